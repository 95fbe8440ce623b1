// OMP_WAIT_POLICY=passive is the default of the program; the user's choice has priority.
#include "cli/program.h"

namespace assay::cli {
namespace {

class WaitPolicy : public testing::Test {
 protected:
  void SetUp() override {
    ::setenv("OMP_DISPLAY_ENV", "verbose", 1);  // libgomp prints the settings that it read
    ::unsetenv("OMP_WAIT_POLICY");
    ::unsetenv("GOMP_SPINCOUNT");
  }
  void TearDown() override {
    for (const char* name : {"OMP_DISPLAY_ENV", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"})
      ::unsetenv(name);
  }
  void expect_setting(const std::string& setting) {
    const Outcome outcome = run(folder_.path(), "--version");
    EXPECT_EQ(outcome.exit_code, 0);
    EXPECT_NE(outcome.error.find(setting), std::string::npos) << setting << " is not in\n"
                                                              << outcome.error;
  }
  data::Folder folder_;
};

TEST_F(WaitPolicy, WaitingThreadsSleepByDefault) { expect_setting("GOMP_SPINCOUNT = '0'"); }

TEST_F(WaitPolicy, PolicyOfTheUserIsKept) {
  ::setenv("OMP_WAIT_POLICY", "active", 1);
  expect_setting("OMP_WAIT_POLICY = 'ACTIVE'");
}

TEST_F(WaitPolicy, SpinCountOfTheUserIsKept) {
  ::setenv("GOMP_SPINCOUNT", "1234", 1);
  expect_setting("GOMP_SPINCOUNT = '1234'");
}

}  // namespace
}  // namespace assay::cli
