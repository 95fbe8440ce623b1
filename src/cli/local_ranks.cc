#include "cli/local_ranks.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <thread>

#include "base/interrupt.h"
#include "base/program.h"
#include "cli/command.h"
#include "study/process.h"

namespace assay::cli {
namespace {

using Clock = std::chrono::steady_clock;

// A free port of this host, listening. Rank 0 inherits the socket, so no other program can take
// the port.
struct Listener {
  int socket = -1;
  int port = 0;

  Listener() : socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    const bool listens = socket >= 0 && ::bind(socket, generic, size) == 0 &&
                         ::listen(socket, SOMAXCONN) == 0 &&
                         ::getsockname(socket, generic, &size) == 0;
    if (!listens) fail<Error>("no port of this host can be opened: {}", std::strerror(errno));
    port = ::ntohs(address.sin_port);
  }
  ~Listener() { ::close(socket); }
  Listener(const Listener&) = delete;
};

class LocalRanks {
 public:
  explicit LocalRanks(int64_t count) {
    const Listener listener;
    for (const char* name : {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"})
      ::unsetenv(name);  // the ranks are not those of a torchrun that started this process
    ::setenv("WORLD_SIZE", std::to_string(count).c_str(), 1);
    ::setenv("LOCAL_WORLD_SIZE", std::to_string(count).c_str(), 1);
    ::setenv("MASTER_ADDR", "127.0.0.1", 1);
    ::setenv("MASTER_PORT", std::to_string(listener.port).c_str(), 1);
    const std::vector<std::string> arguments = own_command_line();
    for (int64_t rank = 0; rank < count; ++rank) {
      ::setenv("RANK", std::to_string(rank).c_str(), 1);
      ::setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
      if (rank == 0) {
        ::setenv("ASSAY_LISTENING_SOCKET", std::to_string(listener.socket).c_str(), 1);
        ::fcntl(listener.socket, F_SETFD, 0);
      }
      processes_.push_back({.id = study::start({.arguments = arguments})});
      ::unsetenv("ASSAY_LISTENING_SOCKET");
      ::fcntl(listener.socket, F_SETFD, FD_CLOEXEC);
    }
  }
  ~LocalRanks() { signal_all(SIGKILL); }

  void wait() {
    constexpr auto kGrace = std::chrono::seconds(5);
    bool told = false;
    std::optional<Clock::time_point> kill_at;
    while (running() > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      // Not SIGTERM: ranks that got it with this process would end without saving
      const bool stop = interrupted();
      if (stop && !told) signal_all(SIGUSR1);
      told = stop;
      collect();
      if (failed_ && !kill_at) kill_at = Clock::now() + kGrace;
      if (kill_at && Clock::now() > *kill_at) signal_all(SIGKILL);
    }
    report();
  }

 private:
  struct Process {
    pid_t id;
    bool over = false;
    study::Ending ending = {};
  };

  int64_t running() const { return std::ranges::count(processes_, false, &Process::over); }
  void signal_all(int number) {
    for (const Process& process : processes_)
      if (!process.over) ::kill(process.id, number);
  }
  void collect() {
    for (size_t rank = 0; rank < processes_.size(); ++rank) {
      Process& process = processes_[rank];
      if (process.over) continue;
      process.over = study::ended(process.id, process.ending);
      const bool failed =
          process.over && process.ending.code != kDone && process.ending.code != kInterrupted;
      if (failed && !failed_) failed_ = rank;
    }
  }
  void report() const {
    if (processes_.front().ending.code != kDone) document_is_printed_unless_killed();
    if (failed_) {
      const Process& first = processes_[*failed_];
      throw Error(fmt::format("rank {} of {} (process {}): {}; the other ranks were stopped",
                              *failed_, processes_.size(), first.id, first.ending.text()),
                  first.ending.killed ? kFailed : ExitCode(first.ending.code));
    }
    for (const Process& process : processes_)
      if (process.ending.code == kInterrupted)
        throw Interrupted("interrupted; all ranks have ended");
  }
  // Rank 0 has then written the document of the error.
  void document_is_printed_unless_killed() const {
    if (!processes_.front().ending.killed) document_is_printed();
  }

  std::vector<Process> processes_;
  std::optional<size_t> failed_;  // the first that failed
};

}  // namespace

void run_local_ranks(int64_t ranks) { LocalRanks(ranks).wait(); }

}  // namespace assay::cli
