#include "base/interrupt.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

namespace assay {
namespace {

using std::chrono::milliseconds;

void wait_until_interrupted() {
  while (!interrupted()) std::this_thread::sleep_for(milliseconds(1));
}

// True if a handler ran in this thread while it slept, so while it could have computed.
bool is_disturbed_by(int signal) {
  std::thread sender([signal] {
    std::this_thread::sleep_for(milliseconds(100));
    ::kill(::getpid(), signal);
  });
  const timespec time{.tv_sec = 0, .tv_nsec = 300'000'000};
  const bool disturbed = ::nanosleep(&time, nullptr) != 0;
  sender.join();
  return disturbed;
}

// Its frame would overwrite memory that libraries keep below the stack pointer.
TEST(Interrupt, HandlersRunOutsideTheThreadsThatCompute) {
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1})
    EXPECT_EXIT(
        {
          catch_interrupts();
          const bool disturbed = is_disturbed_by(signal);
          wait_until_interrupted();
          ::_exit(disturbed ? 1 : 0);
        },
        testing::ExitedWithCode(0), "")
        << "signal " << signal;
}

TEST(Interrupt, LaterThreadsBlockTheSignals) {
  EXPECT_EXIT(
      {
        catch_interrupts();
        sigset_t mask;
        std::thread([&] { ::pthread_sigmask(SIG_BLOCK, nullptr, &mask); }).join();
        int blocked = 0;
        for (const int signal : {SIGINT, SIGTERM, SIGUSR1}) blocked += ::sigismember(&mask, signal);
        ::_exit(blocked);
      },
      testing::ExitedWithCode(3), "");
}

TEST(Interrupt, SecondTerminationEndsTheProcess) {
  EXPECT_EXIT(
      {
        catch_interrupts();
        ::kill(::getpid(), SIGTERM);
        wait_until_interrupted();
        while (true) {
          std::this_thread::sleep_for(milliseconds(10));  // the handler may not have ended yet
          ::kill(::getpid(), SIGTERM);
        }
      },
      testing::KilledBySignal(SIGTERM), "");
}

TEST(Interrupt, UserSignalThatAParentBlockedIsSeen) {
  EXPECT_EXIT(
      {
        sigset_t signals;
        ::sigemptyset(&signals);
        ::sigaddset(&signals, SIGUSR1);
        ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
        catch_interrupts();
        for (int i = 0; i < 2; ++i) ::kill(::getpid(), SIGUSR1);
        wait_until_interrupted();
        ::_exit(0);
      },
      testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace assay
