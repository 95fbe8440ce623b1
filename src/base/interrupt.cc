#include "base/interrupt.h"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <thread>

#include "base/error.h"

namespace assay {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGUSR1};

std::atomic<bool> seen = false;
static_assert(std::atomic<bool>::is_always_lock_free);  // a handler may use it

void note(int signal) {
  seen = true;
  if (signal != SIGUSR1) std::signal(signal, SIG_DFL);
}

}  // namespace

// The kernel puts the frame of a handler below the stack pointer of the thread that it interrupts.
// In float32 products of oneDNN 3.10, which torch 2.11 has, the stack pointer is in a buffer on the
// heap, so a handler would overwrite the heap. A thread that computes nothing runs the handlers.
void catch_interrupts() {
  sigset_t signals;
  ::sigemptyset(&signals);
  for (const int signal : kSignals) {
    ::sigaddset(&signals, signal);
    struct sigaction action{};
    action.sa_handler = note;  // no SA_RESTART: read_line() of the commands needs that reads end
    ::sigaction(signal, &action, nullptr);
  }
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // later threads inherit it
  std::thread([signals] {
    ::pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
    while (true) ::pause();
  }).detach();
}
bool interrupted() { return seen; }
void check_interrupt() {
  if (seen) throw Interrupted("interrupted; nothing was left behind");
}

}  // namespace assay
