#pragma once
// For commands that read standard input, which may be a terminal or a pipe that stays open.

namespace assay::cli {

// From now on Ctrl-C and SIGTERM end a read that waits for input, as the end of the input does.
// The caller then calls check_interrupt(). Without this, the read would be started again. Throws
// Interrupted when one has arrived before.
void let_interrupts_end_reading();

}  // namespace assay::cli
