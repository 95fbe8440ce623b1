#pragma once
// Child processes that write their output to a file.
#include <sys/types.h>

#include <string>
#include <vector>

#include "base/files.h"

namespace assay::study {

struct Command {
  std::vector<std::string> arguments;  // [0] is the program
  fs::path output, errors;             // files, appended to; empty `errors`: the same as output
};
// Starts it in a process group of its own, so that a terminal's Ctrl-C reaches only us; it gets SIGTERM when we die.
pid_t start(const Command& command);

struct Ending {
  int code = 0;              // exit code, or 128 + the signal
  bool killed = false;       // by a signal
  std::string text() const;  // "exit code 1", "killed by signal 9 (Killed)"
};
// Has it ended? Does not wait.
bool ended(pid_t child, Ending& ending);
Ending wait(pid_t child);

}  // namespace assay::study
