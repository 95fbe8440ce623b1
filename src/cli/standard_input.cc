#include "cli/standard_input.h"

#include <csignal>

#include "base/interrupt.h"

namespace assay::cli {

bool read_line(std::istream& in, std::string& line) {
  sigset_t signals;
  sigset_t before;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, SIGINT);
  ::sigaddset(&signals, SIGTERM);
  // The system call returns only if a handler runs in the thread that waits
  ::pthread_sigmask(SIG_UNBLOCK, &signals, &before);
  const bool read = !interrupted() && std::getline(in, line);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return read;
}

}  // namespace assay::cli
