#pragma once
// Child processes that write their output to a file.
#include <sys/types.h>

#include <string>
#include <vector>

#include "base/error.h"
#include "base/files.h"

namespace assay::study {

struct Command {
  std::vector<std::string> arguments;  // [0] is the program
  // Files, appended to. Empty `errors`: the same as output; both empty: those of this process.
  fs::path output;
  fs::path errors;
};
// How often a process that a signal stopped is started again.
constexpr int kRestarts = 2;

// Starts it in a process group of its own, so that a terminal's Ctrl-C reaches only us; it gets
// SIGTERM when we die.
pid_t start(const Command& command);

struct Ending {
  int code = 0;             // exit code, or 128 + the signal
  bool killed = false;      // by a signal
  std::string reason = {};  // why Slurm ended the job; "" otherwise
  // By a signal that it did not catch, or that made it save and leave. Only when this process did
  // not send the signal does it come from outside.
  bool stopped_from_outside() const { return killed || code == kInterrupted; }
  std::string text() const;  // "exit code 1", "killed by signal 9 (Killed)", or the reason
};
Ending ending_of(int exit_code);  // a shell reports a signal as 128 + its number
// Has it ended? Does not wait.
bool ended(pid_t child, Ending& ending);
Ending wait(pid_t child);

// A command that has ended, and what it wrote.
struct Captured {
  Ending ending;
  std::string output;
  std::string errors;
};
Captured capture(const std::vector<std::string>& arguments);

}  // namespace assay::study
