// Options take one value each, so they never swallow the positional argument that follows.
#include "cli/program.h"

namespace assay::cli {
namespace {

class Options : public testing::Test {
 protected:
  void expect(const std::string& arguments, int exit_code, const std::string& part) {
    const Outcome outcome = run(folder_.path(), arguments);
    EXPECT_EQ(outcome.exit_code, exit_code) << arguments << "\n" << outcome.error;
    EXPECT_NE((outcome.out + outcome.error).find(part), std::string::npos)
        << arguments << ": '" << part << "' is not in\n"
        << outcome.out << outcome.error;
  }
  data::Folder folder_;
};

TEST_F(Options, ListOptionLeavesThePositionalArgument) {
  const std::string bench = "bench models --device cpu --threads 1 --steps 0 --time 16 --vocab 50 ";
  expect(bench + "--state-at 64 '" + kSmoke + "'", 0, "state at 64");
  expect(bench + "--state-at 64,128 '" + kSmoke + "'", 0, "state at 128");
  expect("run --devices cpu missing.toml -o study", 2, "missing.toml");
  expect("run --reuse a --reuse b missing.toml -o study", 2, "missing.toml");
}

TEST_F(Options, SecondAssignmentIsExplained) {
  synthesize(folder_);
  expect("train --data store -o run --set train.steps=1 train.seed=2 '" + kSmoke + "'", 2,
         "--set takes one KEY=VALUE: write --set train.seed=2");
}

TEST_F(Options, RepeatedAssignmentsAllCount) {
  synthesize(folder_);
  expect("train --data store -o run --threads 1 --set train.steps=1 --set train.seed=2 '" + kSmoke +
             "'",
         0, "1 steps");
  EXPECT_NE(read_file(folder_ / "run" / "config.toml").find("seed = 2"), std::string::npos);
}

TEST_F(Options, RepeatedDomainsAllCount) {
  folder_.write("text/a/1.txt", "the first domain");
  folder_.write("text/b/1.txt", "the second domain");
  expect("data prepare --tokenizer none -o store --domain 'a=text/a/*' --domain 'b' text", 2,
         "'b': NAME=GLOB");
}

TEST_F(Options, BadNumberNamesTheExpectation) {
  expect("bench models --batch x", 2, "--batch: 'x' is not a positive number");
  expect("bench models --time 0", 2, "--time: '0' is not a positive number");
  expect("bench models --steps=-3", 2, "--steps: '-3' is not zero or a positive number");
  expect("bench attention --lengths 24,x", 2, "--lengths: 'x' is not a positive number");
}

}  // namespace
}  // namespace assay::cli
