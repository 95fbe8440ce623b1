// The runner as it submits runs to Slurm and continues, with scripts in the place of Slurm's
// commands: the queue holds what the test writes.
#include "study/slurm.h"

#include <fstream>

#include "fake_trainer.h"
#include "study/runner.h"

namespace assay::study {
namespace {

constexpr const char* kSbatch = R"(#!/bin/sh
echo "$*" >> "$FAKE_LOG.sbatch"
if [ "$FAKE" = refuse ]; then
  echo "sbatch: error: invalid partition specified: nope" >&2
  exit 1
fi
echo $((100 + $(wc -l < "$FAKE_LOG.sbatch")))
)";
constexpr const char* kSqueue = R"(#!/bin/sh
if [ "$FAKE" = unreachable ]; then
  echo "slurm_load_jobs error: Unable to contact slurm controller" >&2
  exit 1
fi
if [ -e "$FAKE_LOG.queue" ]; then cat "$FAKE_LOG.queue"; fi
)";

class StudyThroughSlurm : public FakeStudy {
 protected:
  void SetUp() override {
    FakeStudy::SetUp();
    program("sbatch", kSbatch);
    program("squeue", kSqueue);
    program("sacct", "#!/bin/sh\necho Slurm accounting storage is disabled >&2\nexit 1\n");
    program("scontrol", "#!/bin/sh\necho \"$*\" >> \"$FAKE_LOG.scontrol\"\n");
    program("srun", "#!/bin/sh\nshift\nexec \"$@\"\n");
    program("scancel", "#!/bin/sh\necho \"$*\" >> \"$FAKE_LOG.scancel\"\n");
    path_ = std::getenv("PATH");
    ::setenv("PATH", ((folder / "bin").string() + ":/usr/bin:/bin").c_str(), 1);
  }
  void TearDown() override {
    ::setenv("PATH", path_.c_str(), 1);
    for (const char* name : {"SLURM_JOB_NAME", "SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID"})
      ::unsetenv(name);
    FakeStudy::TearDown();
  }
  void program(const std::string& name, const std::string& text) {
    make_folder(folder / "bin");
    write_file(folder / "bin" / name, text);
    fs::permissions(folder / "bin" / name, fs::perms::owner_all);
  }
  StudyOptions slurm_options(const std::string& plan = kPlan) {
    StudyOptions out = options(plan);
    out.jobs = 1;
    out.slurm = SlurmOptions{.sbatch = {"--partition=gpu"},
                             .command = {"/opt/assay", "run", "my plan.toml", "--no-wait"},
                             .wait = false};
    return out;
  }
  // The lines that sbatch was called with.
  std::vector<std::string> submissions() {
    std::vector<std::string> lines;
    std::ifstream file(folder / "starts.sbatch");
    for (std::string line; std::getline(file, line);) lines.push_back(line);
    return lines;
  }
  // The name of the study's controller jobs.
  std::string tag() {
    const std::string line = submissions().at(0);
    const size_t begin = line.find("--job-name=") + 11;
    return line.substr(begin, line.find(".1 ", begin) - begin);
  }
  void set_queue(const std::string& text) { write_file(folder / "starts.queue", text); }
  // As a controller job does.
  Outcome continue_plan(const StudyOptions& study) {
    ::setenv("SLURM_JOB_NAME", tag().c_str(), 1);
    ::setenv("SLURM_JOB_ID", "900", 1);
    return run_plan(study);
  }
  fs::path slurm_folder() { return folder / "study/slurm"; }
  void expect_contains(const std::string& text, const std::vector<std::string>& parts) {
    for (const std::string& part : parts)
      EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
  // Runs the script of an array for each task, as Slurm would.
  void train(const std::string& array, int tasks) {
    for (int task = 0; task < tasks; ++task) {
      ::setenv("SLURM_ARRAY_TASK_ID", std::to_string(task).c_str(), 1);
      ::setenv("SLURM_JOB_ID", "17", 1);
      const auto result = capture({"/bin/bash", slurm_folder() / (array + ".sh")});
      EXPECT_EQ(result.errors, "");
      write_file(slurm_folder() / fmt::format("{}.{}.log", array, task), result.output);
    }
  }

 private:
  std::string path_;
};

TEST_F(StudyThroughSlurm, RunsBecomeAnArrayAndAControllerJobThatFollowsIt) {
  set_queue("");
  const Outcome outcome = run_plan(slurm_options());
  EXPECT_EQ(outcome.in_queue, 4);
  EXPECT_EQ(outcome.done, 0);
  ASSERT_EQ(submissions().size(), 2u);
  expect_contains(submissions()[0], {"--partition=gpu", "--array=0-3", "slurm/1.sh"});
  expect_contains(submissions()[1], {"--partition=gpu", "slurm/controller.sh"});
  expect_contains(read_file(slurm_folder() / "controller.sh"),
                  {"exec /opt/assay run 'my plan.toml' --no-wait", fs::current_path().string()});
  const std::string script = read_file(slurm_folder() / "1.sh");
  expect_contains(script, {"#SBATCH --requeue", "#SBATCH --signal=USR1@120", "full.seed-1."});
  EXPECT_EQ(starts(), "") << "a run was started on this machine";
}

TEST_F(StudyThroughSlurm, ScriptTrainsEachRunAndTheControllerTakesTheResults) {
  run_plan(slurm_options());
  train("1", 4);
  EXPECT_EQ(count(starts(), '\n'), 4);
  const Outcome outcome = continue_plan(slurm_options());
  EXPECT_EQ(outcome.done, 4);
  EXPECT_EQ(outcome.in_queue, 0);
  EXPECT_EQ(submissions().size(), 2u) << "nothing was left to submit";
}

TEST_F(StudyThroughSlurm, SavedRunIsRequeuedByItsScript) {
  run_plan(slurm_options());
  train("1", 1);
  EXPECT_FALSE(fs::exists(folder / "starts.scontrol"));
  program("srun", "#!/bin/sh\nexit 130\n");
  train("1", 1);
  EXPECT_EQ(read_file(folder / "starts.scontrol"), "requeue 17\n");
  EXPECT_EQ(read_file(slurm_folder() / "1.0.log"), "exit code 130\n");
}

TEST_F(StudyThroughSlurm, RunsInTheQueueAreNotSubmittedAgain) {
  run_plan(slurm_options());
  const std::string array = tag() + ".1";
  set_queue(
      fmt::format("101_0|101|0|RUNNING|None|{0}\n101_1|101|1|PENDING|Resources|{0}\n"
                  "101_2|101|2|COMPLETING|None|{0}\n101_3|101|3|CANCELLED|None|{0}\n"
                  "102|102|N/A|PENDING|Dependency|{1}\n7_3|7|3|RUNNING|None|other.1\n",
                  array, tag()));
  EXPECT_EQ(run_plan(slurm_options()).in_queue, 4);
  ASSERT_EQ(submissions().size(), 4u);
  expect_contains(submissions()[2], {"--array=0-0", "slurm/2.sh"});
  expect_contains(submissions()[3], {"--dependency=afterany:101 "});
  expect_contains(read_file(slurm_folder() / "2.sh"), {"window.seed-2."});
  EXPECT_EQ(read_file(folder / "starts.scancel"), "102\n") << "the controller job was replaced";
}

TEST_F(StudyThroughSlurm, RunThatIsLostAgainAndAgainIsReported) {
  run_plan(slurm_options());
  set_queue(fmt::format("101_1|101|1|TIMEOUT|TimeLimit|{}.1\n", tag()));
  EXPECT_EQ(continue_plan(slurm_options()).in_queue, 4);
  EXPECT_EQ(continue_plan(slurm_options()).in_queue, 4);
  set_queue(fmt::format("106_1|106|1|OUT_OF_MEMORY|OutOfMemory|{}.3\n", tag()));
  program("sacct", fmt::format("#!/bin/sh\necho '106_2|NODE_FAIL|{}.3'\n", tag()));
  const Outcome outcome = continue_plan(slurm_options());
  EXPECT_EQ(outcome.in_queue, 0);
  ASSERT_EQ(outcome.failures.size(), 4u);
  std::string reasons;
  for (const Failure& failure : outcome.failures) reasons += failure.reason + "\n";
  expect_contains(reasons, {"its job left Slurm's queue", "visible on the nodes",
                            "(job 106_1), state OUT_OF_MEMORY", "queue, state NODE_FAIL"});
  EXPECT_EQ(continue_plan(slurm_options()).failures.size(), 4u) << "failures were not kept";
  EXPECT_EQ(run_plan(slurm_options()).in_queue, 4) << "the same command tries again";
}

TEST_F(StudyThroughSlurm, FailedRunIsReportedWithItsLogAndNotRepeated) {
  ::setenv("FAKE", "fail", 1);
  run_plan(slurm_options());
  train("1", 4);
  const Outcome outcome = continue_plan(slurm_options());
  EXPECT_EQ(outcome.done, 2);
  ASSERT_EQ(outcome.failures.size(), 2u);
  expect_contains(outcome.failures[0].reason, {"exit code 1", "the loss is NaN at step 3"});
  EXPECT_EQ(submissions().size(), 2u);
}

TEST_F(StudyThroughSlurm, RunsThatDependOnTheChosenRateFollowInTheirOwnArray) {
  const StudyOptions study = slurm_options(
      std::string(kPlan) + "tune = { learning_rate = [0.001, 0.002], tokens = 4000 }\n");
  EXPECT_EQ(run_plan(study).in_queue, 4);
  train("1", 4);
  EXPECT_EQ(continue_plan(study).in_queue, 2) << "two of four are the runs that chose the rate";
  train("2", 2);
  const Outcome outcome = continue_plan(study);
  EXPECT_EQ(outcome.done, 8);
  EXPECT_TRUE(outcome.failures.empty());
}

TEST_F(StudyThroughSlurm, RefusedSubmissionIsReportedAndLeavesNoArray) {
  ::setenv("FAKE", "refuse", 1);
  expect_contains(message([&] { run_plan(slurm_options()); }),
                  {"sbatch failed (exit code 1)", "invalid partition specified: nope"});
  EXPECT_FALSE(fs::exists(slurm_folder() / "1.json"));
  ::setenv("FAKE", "", 1);
  EXPECT_EQ(run_plan(slurm_options()).in_queue, 4);
}

TEST_F(StudyThroughSlurm, UnknownQueueSubmitsNothing) {
  ::setenv("FAKE", "unreachable", 1);
  expect_contains(message([&] { run_plan(slurm_options()); }),
                  {"squeue failed", "Unable to contact slurm controller"});
  EXPECT_FALSE(fs::exists(folder / "starts.sbatch"));
  EXPECT_FALSE(fs::exists(folder / "study"));
}

TEST_F(StudyThroughSlurm, HostWithoutSlurmChangesNothing) {
  ::setenv("PATH", "/usr/bin-none", 1);
  expect_contains(message([&] { run_plan(slurm_options()); }),
                  {"squeue is not in PATH", "Nothing was changed"});
  EXPECT_FALSE(fs::exists(folder / "study"));
}

TEST_F(StudyThroughSlurm, OptionsThatTheLauncherSetsAreRejected) {
  for (const char* option : {"--array=0-7", "-Jmine", "--output", "-o"}) {
    StudyOptions study = slurm_options();
    study.slurm->sbatch = {option};
    expect_contains(message([&] { run_plan(study); }), {option, "is set by `assay run` itself"});
  }
  StudyOptions study = slurm_options();
  study.devices = {"cuda:0", "cuda:1"};
  expect_contains(message([&] { run_plan(study); }), {"one device"});
}

}  // namespace
}  // namespace assay::study
