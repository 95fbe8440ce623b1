#pragma once
// `assay train --ranks N`: this command line once per rank, on this host.
#include <cstdint>

namespace assay::cli {

// Starts the ranks and waits for them. Rank 0 writes to standard output. When one fails or is
// killed, the others are stopped. Passes on Ctrl-C, SIGTERM and SIGUSR1. Throws Error with the
// exit code of the rank that failed.
void run_local_ranks(int64_t ranks);

}  // namespace assay::cli
