#include "study/process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string_view>

#include "base/error.h"

namespace assay::study {
namespace {

int open_log(const fs::path& file) {
  const int descriptor = ::open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (descriptor < 0) fail<Error>("{}: cannot be written: {}", file.string(), std::strerror(errno));
  return descriptor;
}

Ending decode(int status) {
  if (WIFSIGNALED(status)) return {128 + WTERMSIG(status), true};
  return ending_of(WEXITSTATUS(status));
}

[[noreturn]] void fail_waiting(pid_t child) {
  fail<Error>("the end of process {} cannot be read: {}", child, std::strerror(errno));
}

// A file without a name.
class MemoryFile {
 public:
  MemoryFile() : descriptor_(::memfd_create("output", MFD_CLOEXEC)) {
    if (descriptor_ < 0) fail<Error>("no memory for a file: {}", std::strerror(errno));
  }
  ~MemoryFile() { ::close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  fs::path path() const { return fmt::format("/proc/self/fd/{}", descriptor_); }

 private:
  int descriptor_;
};

}  // namespace

Ending ending_of(int exit_code) { return {exit_code, exit_code > 130}; }

std::string Ending::text() const {
  if (!reason.empty()) return reason;
  return killed ? fmt::format("killed by signal {} ({})", code - 128, strsignal(code - 128))
                : fmt::format("exit code {}", code);
}

// fork and exec, not posix_spawn: only code between the two can ask for a signal at
// the parent's death.
pid_t start(const Command& command) {
  const int output = command.output.empty() ? ::dup(1) : open_log(command.output);
  const int errors = !command.errors.empty()  ? open_log(command.errors)
                     : command.output.empty() ? ::dup(2)
                                              : output;
  std::vector<char*> arguments;
  for (const std::string& argument : command.arguments)
    arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  // If the signal is ignored, as a parent of this process may have set, the kernel forgets how
  // children end.
  ::signal(SIGCHLD, SIG_DFL);
  sigset_t user_signal;
  sigset_t ending_signals;
  ::sigemptyset(&user_signal);
  ::sigaddset(&user_signal, SIGUSR1);
  ::sigemptyset(&ending_signals);
  ::sigaddset(&ending_signals, SIGINT);
  ::sigaddset(&ending_signals, SIGTERM);
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child == 0) {
    // It waits until the program can save its state; see catch_interrupts()
    ::sigprocmask(SIG_BLOCK, &user_signal, nullptr);
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) ::_exit(1);
    ::signal(SIGINT, SIG_DFL);
    ::signal(SIGTERM, SIG_DFL);
    ::sigprocmask(SIG_UNBLOCK, &ending_signals, nullptr);  // catch_interrupts() blocked them
    ::dup2(::open("/dev/null", O_RDONLY), 0);
    ::dup2(output, 1);
    ::dup2(errors, 2);
    ::execv(arguments[0], arguments.data());
    const char* reason = std::strerror(errno);
    const bool replaced = std::string_view(arguments[0]).ends_with(" (deleted)");
    const char* advice = "The program was replaced while it ran. Give the same command again.\n";
    ::dprintf(2, "%s: cannot be run: %s\n%s", arguments[0], reason, replaced ? advice : "");
    ::_exit(1);
  }
  const int code = errno;
  ::close(output);
  if (errors != output) ::close(errors);
  if (child < 0)
    fail<Error>("{}: cannot be started: {}", command.arguments[0], std::strerror(code));
  return child;
}

bool ended(pid_t child, Ending& ending) {
  int status = 0;
  const pid_t result = ::waitpid(child, &status, WNOHANG);
  if (result < 0 && errno != EINTR) fail_waiting(child);
  if (result == child) ending = decode(status);
  return result == child;
}

Ending wait(pid_t child) {
  int status = 0;
  while (::waitpid(child, &status, 0) < 0)
    if (errno != EINTR) fail_waiting(child);
  return decode(status);
}

Captured capture(const std::vector<std::string>& arguments) {
  const MemoryFile output;
  const MemoryFile errors;
  const Ending ending = wait(start({arguments, output.path(), errors.path()}));
  return {ending, read_file(output.path()), read_file(errors.path())};
}

}  // namespace assay::study
