#pragma once
// Ctrl-C, SIGTERM and SIGUSR1, seen at safe points: the first asks long work to save and leave. A
// second Ctrl-C or SIGTERM ends the process without saving. Schedulers send SIGUSR1 ahead of their
// limit, some of them more than once.

namespace assay {

// Installs the handlers; once, from main, before other threads start. They run in a thread of their
// own. All other threads, and programs that this one starts, inherit that the signals are blocked.
void catch_interrupts();
bool interrupted();      // has one arrived?
void check_interrupt();  // throws Interrupted when one has, for work that has nothing to save

}  // namespace assay
