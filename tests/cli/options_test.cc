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

// Each of these had another value than it says, or none.
TEST_F(Options, NumberThatIsNotDecimalOrDoesNotFitIsRefused) {
  const std::string generate = "generate --model missing ";
  const std::string large = "99999999999999999999";
  expect(generate + "--max-tokens 010", 2, "--max-tokens: '010' is not an integer from ");
  expect(generate + "--max-tokens 0x10", 2, "--max-tokens: '0x10' is not an integer from ");
  expect(generate + "--seed " + large, 2,
         "--seed: '" + large + "' is not an integer from 0 to 18446744073709551615");
  expect(generate + "--seed=-1", 2, "--seed: '-1' is not an integer from 0 to ");
  expect(generate + "--seed -1", 2, "--seed: '-1' is not an integer from 0 to ");
  expect(generate + "--samples " + large, 2, "--samples");
  expect(generate + "--temperature ''", 2, "--temperature: '' is not a number");
  expect(generate + "--temperature 1e999", 2, "--temperature: '1e999' is not a number");
  expect(generate + "--temperature nan", 2, "--temperature: 'nan' is not a number");
  expect("bench models --steps 0 --time " + large, 2, "--time: '" + large + "' is not an integer");
  expect("data synth -o synthetic --documents " + large, 2, "--documents: '" + large + "'");
  expect("bench attention --lengths 24,030", 2, "--lengths: '030' is not an integer");
  expect("eval extrapolation missing --data d --set a.b --factor 9223372036854775807", 2,
         "--factor");
  EXPECT_FALSE(fs::exists(folder_ / "synthetic"));
  expect(generate + "--max-tokens 0 --seed 18446744073709551615 --temperature 1e-3", 2,
         "no such model");
}

TEST_F(Options, BadNumberOfAnEvaluationNamesTheExpectation) {
  expect("eval niah m --lengths 1k --samples 0", 2, "--samples: '0' is not a positive number");
  expect("eval tasks m --tasks piqa --limit=-1", 2,
         "--limit: '-1' is not zero or a positive number");
  expect("eval extrapolation m --data d --set a.b --at-once x", 2,
         "--at-once: 'x' is not a positive number");
  for (const char* threshold : {"-1", "1"})
    expect(fmt::format("eval probe m --data d --threshold={}", threshold), 2,
           fmt::format("--threshold {}: it is a share", threshold));
  expect("eval probe m --data d --threshold nan", 2, "--threshold: 'nan' is not a number");
}

TEST_F(Options, EmptyRequiredValueIsRefused) {
  expect("generate --model ''", 2, "--model: the value is empty");
  expect("train '" + kSmoke + "' --data store -o ''", 2, "--output: the value is empty");
}

TEST_F(Options, MisspelledOptionIsNamedWithTheNearest) {
  expect("train x.toml --data store -o run --resum", 2,
         "unknown option '--resum'; did you mean '--resume'?");
  expect("train x.toml --dat store -o run", 2, "unknown option '--dat'; did you mean '--data'?");
  expect("doctor --device cuda", 2, "unknown option '--device'");
  expect("run p.toml -o s --launcher slurm --sbatch --partition=gpu --joobs 2", 2,
         "unknown option '--joobs'; did you mean '--jobs'?");
}

TEST_F(Options, WithoutACommandTheHelpIsPrinted) {
  expect("", 2, "Usage: ");
  expect("", 2, "train one model on a token store");
  expect("help", 0, "train one model on a token store");
  expect("help train", 0, "--resume");
  expect("help eval tasks", 0, "--few-shot");
  expect("list", 2,
         "list takes a kind: mixers, channel_mixers, ops, models, plans, tasks, datasets");
}

TEST_F(Options, EveryHelpEndsWithAnExample) {
  for (const char* command : {"bench attention",
                              "bench models",
                              "data adopt",
                              "data info",
                              "data overlap",
                              "data prepare",
                              "data synth",
                              "data verify",
                              "describe",
                              "doctor",
                              "eval extrapolation",
                              "eval loss",
                              "eval mqar",
                              "eval niah",
                              "eval probe",
                              "eval tasks",
                              "export",
                              "generate",
                              "import",
                              "list",
                              "plan new",
                              "report",
                              "run",
                              "score",
                              "serve",
                              "tokenizer decode",
                              "tokenizer encode",
                              "tokenizer train",
                              "train"}) {
    expect(fmt::format("{} --help", command), 0, "Example");
    expect(fmt::format("{} --help", command), 0, fmt::format("\n  assay {}", command));
  }
}

TEST_F(Options, PlansAndMqarPlansAreFoundByTheirNames) {
  expect("eval mqar mqar/smal -o out", 2, "did you mean 'mqar/small'?");
  synthesize(folder_);
  folder_.write("plan.toml", "reference = 'transformer++'\nmodels = ['mamba2']\n");
  expect("train plan.toml --data store -o run", 2, "`assay run plan.toml --data STORE -o STUDY`");
}

}  // namespace
}  // namespace assay::cli
