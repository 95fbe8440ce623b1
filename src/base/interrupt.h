#pragma once
// Ctrl-C, SIGTERM and SIGUSR1, seen at safe points: the first asks long work to save and leave. A
// second Ctrl-C or SIGTERM ends the process without saving. Schedulers send SIGUSR1 ahead of their
// limit, some of them more than once.

namespace assay {

void catch_interrupts();  // installs the handlers; once, from main
bool interrupted();       // has one arrived?
void check_interrupt();   // throws Interrupted when one has, for work that has nothing to save

}  // namespace assay
