#pragma once
// The program as a process, in a folder that goes away.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <map>
#include <string>
#include <thread>

#include "data/folder.h"

namespace assay::cli {

struct Outcome {
  int exit_code;  // 128 + signal for a process that a signal ended
  std::string out;
  std::string error;
};

class Process {
 public:
  // `arguments` as a shell reads them; runs in `folder`.
  Process(const fs::path& folder, const std::string& arguments)
      : logs_(fs::temp_directory_path() /
              fmt::format("assay_process{}_{}", ::getpid(), count()++)) {
    make_folder(logs_);
    const std::string command =
        fmt::format("cd '{}' && exec '{}' {}", folder.string(), ASSAY_PROGRAM, arguments);
    const std::string out = logs_ / "out";
    const std::string error = logs_ / "error";
    // A process that is killed before it opens them leaves them empty.
    for (const std::string& file : {out, error}) write_file(file, "");
    pid_ = ::fork();
    if (pid_ != 0) return;
    ::dup2(::open(out.c_str(), O_WRONLY | O_CREAT, 0644), STDOUT_FILENO);
    ::dup2(::open(error.c_str(), O_WRONLY | O_CREAT, 0644), STDERR_FILENO);
    ::execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    ::_exit(127);
  }
  ~Process() {
    if (pid_ > 0) {
      signal(SIGKILL);
      wait();
    }
    fs::remove_all(logs_);
  }
  Process(const Process&) = delete;
  pid_t id() const { return pid_; }
  void signal(int number) const { ::kill(pid_, number); }
  bool running() {
    siginfo_t info{};
    return pid_ > 0 && ::waitid(P_PID, id_t(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid == 0;
  }
  Outcome wait() {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = 0;
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
            read_file(logs_ / "out"), read_file(logs_ / "error")};
  }

 private:
  static int& count() {
    static int number = 0;
    return number;
  }
  fs::path logs_;
  pid_t pid_;
};

inline Outcome run(const fs::path& folder, const std::string& arguments) {
  return Process(folder, arguments).wait();
}

inline void sleep_seconds(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// A TCP port of this host. While the object lives the port is used by it.
struct Port {
  int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  int number = 0;
  Port() {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    socklen_t size = sizeof address;
    ::bind(socket, reinterpret_cast<sockaddr*>(&address), size);
    ::listen(socket, 1);
    ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size);
    number = ::ntohs(address.sin_port);
  }
  ~Port() { ::close(socket); }
};

// False when `condition` did not come true while the process ran.
bool wait_until(Process& process, auto&& condition) {
  while (!condition()) {
    if (!process.running()) return condition();
    sleep_seconds(0.001);
  }
  return true;
}

// Contents of every file below a folder, by path; locks left out.
inline std::map<std::string, std::string> contents(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.is_regular_file() && entry.path().filename() != ".lock")
      files[fs::relative(entry.path(), folder)] = sha256_of_file(entry.path());
  return files;
}

inline const std::string kSmoke = ASSAY_SOURCE_DIR "/plans/models/smoke.toml";
inline void synthesize(const data::Folder& folder, const std::string& options = "") {
  const Outcome made =
      run(folder.path(),
          "data synth -o store --documents 60 --held-out 4 --document-length 128 " + options);
  ASSERT_EQ(made.exit_code, 0) << made.error;
}
inline std::string train(const std::string& run, const std::string& more = "") {
  return fmt::format("train '{}' --data store -o {} --threads 1 --device cpu {}", kSmoke, run,
                     more);
}

}  // namespace assay::cli
