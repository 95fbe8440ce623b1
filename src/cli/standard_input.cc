#include "cli/standard_input.h"

#include <csignal>

#include "base/interrupt.h"

namespace assay::cli {

void let_interrupts_end_reading() {
  for (const int signal : {SIGINT, SIGTERM}) {
    struct sigaction action {};
    ::sigaction(signal, nullptr, &action);
    action.sa_flags &= ~SA_RESTART;
    ::sigaction(signal, &action, nullptr);
  }
  check_interrupt();
}

}  // namespace assay::cli
