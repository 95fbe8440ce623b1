// Tasks of a plan: checked before anything is trained, evaluated once, continued.
#include "study/tasks.h"

#include <signal.h>
#include <sys/wait.h>

#include <thread>

#include "base/interrupt.h"
#include "data/synthetic.h"
#include "fake_trainer.h"

namespace assay::study {
namespace {

class StudyTasks : public FakeStudy {
 protected:
  void SetUp() override {
    FakeStudy::SetUp();
    data::synthesize(folder / "store", {.documents = 4, .held_out = 2, .document_length = 64});
    write_file(folder / "store/tokenizer.model", "a tokenizer");
    make_folder(folder / "documents");
  }
  StudyOptions with(const std::string& tasks) {
    std::string plan = kPlan;
    const size_t begin = plan.find("synthetic");
    const size_t end = plan.find("train =");
    plan.replace(begin, end - begin, fmt::format("store = \"{}\", ", (folder / "store").string()));
    return options(plan + tasks);
  }
  StudyOptions with_tasks(const std::string& list = R"("piqa", "race")",
                          const std::string& more = "") {
    return with(fmt::format("tasks = {{ data = \"{}\", list = [{}]{} }}\n",
                            (folder / "documents").string(), list, more));
  }
  // Lines "RUN TASK" of what was evaluated.
  std::string evaluated() {
    const fs::path log = folder / "starts.tasks";
    return fs::exists(log) ? read_file(log) : "";
  }
  std::vector<StudyRun> runs() { return Store(folder / "study").planned_runs(); }
};

TEST_F(StudyTasks, EveryFinalCheckpointIsEvaluatedOnce) {
  EXPECT_TRUE(run_plan(with_tasks()).task_failures.empty());
  EXPECT_EQ(count(evaluated(), '\n'), 8) << evaluated();
  for (const StudyRun& run : runs()) {
    ASSERT_EQ(run.finished->tasks.size(), 2u) << run.name;
    EXPECT_EQ(run.finished->tasks[0].metrics[0].bits, "f0");
  }
  const auto settings = Store(folder / "study").plan().settings;
  ASSERT_TRUE(settings[0].tasks);
  EXPECT_EQ(settings[0].tasks->at(1).name, "race");
  run_plan(with_tasks());
  EXPECT_EQ(count(evaluated(), '\n'), 8) << "an evaluation was repeated";
}

TEST_F(StudyTasks, TasksThatAreAddedLaterTrainNothing) {
  run_plan(with(""));
  EXPECT_EQ(evaluated(), "");
  run_plan(with_tasks(R"("piqa")"));
  EXPECT_EQ(count(evaluated(), '\n'), 4);
  run_plan(with_tasks());
  EXPECT_EQ(count(evaluated(), '\n'), 8) << "only the new task is evaluated";
  EXPECT_EQ(count(starts(), '\n'), 4) << "a finished run was trained again";
}

TEST_F(StudyTasks, ModelThatWasRenamedBeforeItsRunEndedIsEvaluated) {
  ::setenv("FAKE", "fail", 1);  // models named window
  run_plan(with_tasks());
  ::setenv("FAKE", "", 1);
  StudyOptions renamed = with_tasks();
  std::string plan = read_file(renamed.plan);
  plan.replace(plan.find("\"window\""), 8, "\"narrow\"");
  write_file(renamed.plan, plan + "[model.narrow]\nbase = \"window\"\n");
  EXPECT_EQ(run_plan(renamed).done_before, 2);
  for (const StudyRun& run : runs())
    for (const run::TaskResult& task : run.finished->tasks) EXPECT_EQ(task.problem, "") << run.name;
  EXPECT_EQ(count(evaluated(), '\n'), 8) << evaluated();
}

TEST_F(StudyTasks, ChangedDocumentsOrLimitsAreEvaluatedAgain) {
  run_plan(with_tasks());
  ::setenv("FAKE_KEY", "other documents", 1);
  run_plan(with_tasks());
  EXPECT_EQ(count(evaluated(), '\n'), 16);
  run_plan(with_tasks(R"("piqa", "race")", ", limit = 3"));
  EXPECT_EQ(count(evaluated(), '\n'), 24);
  EXPECT_EQ(runs()[0].finished->tasks.size(), 2u) << "the new result takes the place of the old";
  EXPECT_EQ(count(starts(), '\n'), 4);
}

TEST_F(StudyTasks, KilledEvaluationIsContinued) {
  ::setenv("FAKE_TASKS", "kill", 1);
  EXPECT_TRUE(run_plan(with_tasks()).task_failures.empty());
  for (const StudyRun& run : runs()) EXPECT_EQ(run.finished->tasks.size(), 2u);
}

TEST_F(StudyTasks, FailureOfOneTaskKeepsTheOthers) {
  ::setenv("FAKE_TASKS", "fail-race", 1);
  const Outcome outcome = run_plan(with_tasks());
  EXPECT_TRUE(outcome.failures.empty());
  ASSERT_EQ(outcome.task_failures.size(), 4u);
  EXPECT_EQ(outcome.task_failures[0].name.substr(0, 4), "full");
  EXPECT_NE(outcome.task_failures[0].name.find(", task race"), std::string::npos);
  EXPECT_EQ(outcome.task_failures[0].reason, "the text is empty");
  EXPECT_EQ(runs()[0].finished->tasks[0].metrics.size(), 1u);
  ::setenv("FAKE_TASKS", "", 1);
  EXPECT_TRUE(run_plan(with_tasks()).task_failures.empty());
  EXPECT_EQ(count(evaluated(), '\n'), 12) << "the failed task alone is tried again";
}

TEST_F(StudyTasks, InterruptedEvaluationIsContinued) {
  run_plan(with(""));
  ::setenv("FAKE_TASKS", "slow", 1);
  const StudyOptions study = with_tasks();
  const pid_t child = ::fork();
  if (child == 0) {
    catch_interrupts();
    try {
      run_plan(study);
    } catch (const Error& error) {
      ::_exit(error.exit_code);
    }
    ::_exit(0);
  }
  for (int tries = 0; tries < 600 && count(evaluated(), '\n') < 2; ++tries)
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  ::kill(child, SIGINT);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), kInterrupted);
  ::setenv("FAKE_TASKS", "", 1);
  run_plan(study);
  for (const StudyRun& run : runs()) EXPECT_EQ(run.finished->tasks.size(), 2u);
}

TEST_F(StudyTasks, RunsWithoutWeightsAreReportedByRun) {
  run_plan(with(""));
  fs::remove_all(folder / "study" / runs()[0].folder / "checkpoints");
  EXPECT_TRUE(run_plan(with_tasks()).task_failures.empty());
  EXPECT_EQ(count(evaluated(), '\n'), 6);
  ASSERT_EQ(runs()[0].finished->tasks.size(), 2u);
  EXPECT_EQ(runs()[0].finished->tasks[0].problem,
            "the final weights of the run are not in this study");
  EXPECT_EQ(runs()[1].finished->tasks[0].problem, "");
}

TEST_F(StudyTasks, RecordsCarryTheResults) {
  run_plan(with_tasks());
  write_records(folder / "study", folder / "records");
  StudyOptions again = with_tasks();
  again.study = folder / "again";
  again.reuse = {folder / "records"};
  EXPECT_EQ(run_plan(again).reused, 4);
  EXPECT_EQ(count(evaluated(), '\n'), 8) << "results of records were not used";
  study_of_records(folder / "records", folder / "copy");
  Store copy(folder / "copy", Database::Mode::read);
  EXPECT_EQ(copy.planned_runs()[0].finished->tasks.size(), 2u);
  EXPECT_EQ(copy.plan().settings[0].tasks->size(), 2u);
}

TEST_F(StudyTasks, StudyWithoutTheTableIsRead) {
  run_plan(with(""));
  Database(folder / "study/study.sqlite", Database::Mode::write).execute("DROP TABLE task_results");
  Store store(folder / "study", Database::Mode::read);
  EXPECT_TRUE(store.planned_runs()[0].finished->tasks.empty());
}

TEST_F(StudyTasks, ErrorsAreReportedBeforeAnythingIsTrained) {
  const auto expect = [&](const StudyOptions& study, const std::string& part) {
    const std::string text = message([&] { dry_run(study); });
    EXPECT_NE(text.find(part), std::string::npos) << text;
    EXPECT_NE(text.find("plan.toml:6:"), std::string::npos) << text;
    EXPECT_NE(text.find("Nothing was "), std::string::npos) << text;
    EXPECT_EQ(message([&] { run_plan(study); }), text);
  };
  expect(with_tasks(R"("pica")"), "there is no task 'pica'; did you mean 'piqa'? Nothing was run.");
  expect(with("tasks = [\"piqa\"]\n"), "tasks must be a table, for example");
  expect(with("tasks = { data = \"nowhere\", list = [\"piqa\"] }\n"),
         "there is no folder 'nowhere'");
  expect(with_tasks(""), "tasks.list names no task");
  expect(with_tasks(R"("piqa", "other/piqa.toml")"), "two tasks of the list have the name 'piqa'");
  expect(with_tasks(R"("piqa")", ", limits = 3"), "did you mean 'limit'?");
  expect(with_tasks(R"("piqa")", ", max_length = 200"), "max_length = 200, but full reads 128");
  ::setenv("FAKE_LEAST", "129", 1);
  expect(with_tasks(R"("piqa")"),
         "full reads 128 tokens at most, and task piqa needs 129 to answer every item");
  ::unsetenv("FAKE_LEAST");
  fs::remove(folder / "store/tokenizer.model");
  expect(with_tasks(R"("piqa")"), "tasks need a tokenizer");
  EXPECT_EQ(starts() + evaluated(), "");
}

}  // namespace
}  // namespace assay::study
