#include "base/interrupt.h"

#include <csignal>

#include "base/error.h"

namespace assay {
namespace {

volatile std::sig_atomic_t seen = 0;

void note(int signal) {
  seen = 1;
  if (signal != SIGUSR1) std::signal(signal, SIG_DFL);
}

}  // namespace

void catch_interrupts() {
  std::signal(SIGINT, note);
  std::signal(SIGTERM, note);
  std::signal(SIGUSR1, note);
  sigset_t user_signal;
  ::sigemptyset(&user_signal);
  ::sigaddset(&user_signal, SIGUSR1);
  ::pthread_sigmask(SIG_UNBLOCK, &user_signal, nullptr);  // a parent may have blocked it
}
bool interrupted() { return seen; }
void check_interrupt() {
  if (seen) throw Interrupted("interrupted; nothing was left behind");
}

}  // namespace assay
