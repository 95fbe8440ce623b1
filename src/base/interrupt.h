#pragma once
// Ctrl-C and SIGTERM, seen at safe points: the first asks long work to save and leave, the second
// ends at once.

namespace assay {

void catch_interrupts();  // installs the handlers; once, from main
bool interrupted();       // has one arrived?
void check_interrupt();   // throws Interrupted when one has, for work that has nothing to save

}  // namespace assay
