#include "study/runner.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "base/interrupt.h"
#include "fake_trainer.h"
#include "study/process.h"

namespace assay::study {
namespace {

using Runner = FakeStudy;

constexpr const char* kTune = "tune = { learning_rate = [0.001, 0.002, 0.004], tokens = 4000 }\n";

constexpr const char* kLadder = "ladder = { tokens = [4000, 8000], seeds = [1, 2] }\n";

TEST_F(Runner, RunsEveryModelAndSeedOnce) {
  const Outcome first = run_plan(options());
  EXPECT_EQ(first.planned, 4);
  EXPECT_EQ(first.done, 4);
  EXPECT_EQ(count(starts(), '\n'), 4);
  const Outcome second = run_plan(options());
  EXPECT_EQ(second.done_before, 4);
  EXPECT_EQ(count(starts(), '\n'), 4) << "a finished run was repeated";
}

// A ladder is two budgets of the reference and two seeds; a reference alone needs none.
TEST_F(Runner, MissingLadderIsWarnedOf) {
  const auto warns = [&](const std::string& plan, const std::vector<std::string>& set) {
    StudyOptions study = options(plan);
    study.set = set;
    const Plan read = read_plan(study.plan, study.set);
    const auto warnings = cautions(read, {});
    EXPECT_LE(warnings.size(), 1u);
    return !warnings.empty() && warnings[0].starts_with("the reference has fewer than two budgets");
  };
  EXPECT_TRUE(warns(kPlan, {}));
  EXPECT_TRUE(warns(without_tokens(), {"tokens=[4000]"}));
  EXPECT_TRUE(warns(without_tokens(), {"tokens=[4000, 8000]", "seeds=[1]"}));
  EXPECT_FALSE(warns(without_tokens(), {"tokens=[4000, 8000]"}));
  EXPECT_FALSE(warns(without_tokens() + kLadder, {"tokens=[4000]", "seeds=[1]"}));
  EXPECT_FALSE(warns(kPlan, {"models=[\"full\"]"}));
  testing::internal::CaptureStderr();
  dry_run(options());
  EXPECT_NE(testing::internal::GetCapturedStderr().find(
                "warning: the reference has fewer than two budgets"),
            std::string::npos);
}

// A synthetic domain can be learned from few tokens, and real text cannot.
TEST_F(Runner, ShortLadderOnRealTextIsWarnedOf) {
  const StudyOptions study = options(
      without_tokens() + "tokens = [8000]\nladder = { tokens = [8000, 16000], seeds = [1, 2] }\n");
  const Plan plan = read_plan(study.plan, study.set);
  auto candidates = ask_trainer(plan, study);
  EXPECT_TRUE(cautions(plan, candidates).empty());
  const fs::path manifest = candidates[0].data / "manifest.json";
  auto json = nlohmann::json::parse(read_file(manifest));
  json.erase("synthetic");
  write_file(manifest, json.dump());
  const auto warnings = cautions(plan, candidates);
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("the longest run of the reference reads 0.016M tokens"),
            std::string::npos)
      << warnings[0];
}

TEST_F(Runner, ContendersOfOneSeedAreWarnedOf) {
  const auto warns = [&](const std::vector<std::string>& set) {
    StudyOptions study = options(without_tokens() + "tokens = [4000, 8000]\n" + kLadder);
    study.set = set;
    const auto warnings = cautions(read_plan(study.plan, study.set), {});
    return !warnings.empty() && warnings[0].find("no model but the reference has two seeds") == 0;
  };
  EXPECT_FALSE(warns({}));
  EXPECT_TRUE(warns({"seeds=[1]"}));
  EXPECT_FALSE(warns({"seeds_per_budget=[2, 1]"}));
}

TEST_F(Runner, RunOfFewStepsIsWarnedOf) {
  const auto warnings = [&](const std::string& tokens, const std::string& train) {
    StudyOptions study =
        options(without_tokens() + fmt::format("tokens = [{0}]\nladder = {{ tokens = [{0}, 80000], "
                                               "seeds = [1, 2] }}\n",
                                               tokens));
    study.set = {train};
    const Plan plan = read_plan(study.plan, study.set);
    return cautions(plan, ask_trainer(plan, study));
  };
  const auto few = warnings("100", "train.warmup_fraction=0.1");
  ASSERT_EQ(few.size(), 1u);
  EXPECT_EQ(few[0].find("full has a run of 1 step. So few steps"), 0u) << few[0];
  const auto warm_up = warnings("8000", "train.warmup_steps=20");
  ASSERT_EQ(warm_up.size(), 1u);
  EXPECT_EQ(warm_up[0].find("full has a run of 20 steps, and warmup_steps is 20."), 0u);
  EXPECT_TRUE(warnings("8000", "train.warmup_steps=19").empty());
}

TEST_F(Runner, RunsOnlyWhatAnEditedPlanAdds) {
  run_plan(options());
  std::string plan = kPlan;
  plan.replace(plan.find("[1, 2]"), 6, "[3, 1, 2]");
  EXPECT_EQ(run_plan(options(plan)).done_before, 4);
  EXPECT_EQ(count(starts(), '\n'), 6);
  plan.replace(plan.find("4000"), 4, "8000");  // another budget: other runs, beside the old ones
  EXPECT_EQ(run_plan(options(plan)).done_before, 0);
  EXPECT_EQ(Store(folder / "study").planned_runs().size(), 6u);
}

TEST_F(Runner, DamagedDatabaseIsWrittenAgainFromTheRuns) {
  run_plan(options());
  const fs::path file = folder / "study/study.sqlite";
  for (const uint64_t size : {5000, 10, 0}) {
    fs::resize_file(file, size);
    const std::string text =
        message([&] { Store(folder / "study", Database::Mode::read).planned_runs(); });
    EXPECT_NE(text.find("study.sqlite: The file is damaged"), std::string::npos) << text;
    EXPECT_NE(text.find("Remove study.sqlite"), std::string::npos) << text;
    EXPECT_EQ(text.find("SELECT"), std::string::npos) << text;
  }
  fs::remove(file);
  EXPECT_EQ(run_plan(options()).done, 4);
  EXPECT_EQ(count(starts(), '\n'), 4) << "a finished run was repeated";
}

TEST_F(Runner, StoresWhatRunsLeave) {
  run_plan(options());
  Store store(folder / "study", Database::Mode::read);
  const auto runs = store.planned_runs();
  ASSERT_EQ(runs.size(), 4u);
  EXPECT_EQ(runs[0].name, "full.seed-1");
  EXPECT_EQ(runs[3].model, "window");
  ASSERT_TRUE(runs[0].finished);
  EXPECT_EQ(runs[0].finished->outcome.final_loss, 4.0);
  const run::Metrics& metrics = runs[0].finished->metrics;
  EXPECT_EQ(metrics.training.back().step, 10);
  ASSERT_EQ(metrics.evaluations.size(), 1u);
  EXPECT_EQ(metrics.evaluations[0].evaluation.at("a.test").loss, 4.1);
  Database database(folder / "study/study.sqlite", Database::Mode::read);
  EXPECT_EQ(database.query("SELECT file FROM evaluations")[0]["file"],
            "evaluations/step-10.safetensors");
}

TEST_F(Runner, ComparesTestTextAndHeldOutTextWithTheTrainingText) {
  run_plan(options());
  Store store(folder / "study", Database::Mode::read);
  const auto overlap = store.overlap(store.planned_runs()[0].finished->provenance.data);
  ASSERT_TRUE(overlap);
  using Documents = std::vector<std::pair<std::string, int64_t>>;
  Documents documents;
  for (const auto& row : *overlap) documents.emplace_back(row.domain, row.documents);
  EXPECT_EQ(documents, (Documents{{"fresh_a", 2}, {"known_a", 2}}));
}

TEST_F(Runner, ResumesARunThatWasKilled) {
  ::setenv("FAKE", "kill", 1);
  const Outcome outcome = run_plan(options());
  EXPECT_EQ(outcome.done, 4);
  EXPECT_EQ(count(starts(), '\n'), 8);
  EXPECT_NE(starts().find(" 1\n"), std::string::npos) << "it was not resumed: " << starts();
}

TEST_F(Runner, ResumesARunThatSigtermEnded) {
  ::setenv("FAKE", "terminated", 1);
  const Outcome outcome = run_plan(options());
  EXPECT_EQ(outcome.done, 4);
  EXPECT_NE(starts().find(" 1\n"), std::string::npos) << "it was not resumed: " << starts();
}

TEST_F(Runner, TrainerKilledWhileItIsAskedIsAskedAgain) {
  StudyOptions study = options();
  study.jobs = 1;
  ::setenv("FAKE", "kill-questions:2", 1);
  EXPECT_EQ(run_plan(study).done, 4);
  fs::remove(folder / "starts.questions");
  ::setenv("FAKE", "kill-questions:3", 1);
  EXPECT_NE(message([&] { run_plan(study); }).find("killed by signal 9"), std::string::npos);
}

TEST_F(Runner, GivesUpARunThatIsKilledAgainAndAgain) {
  ::setenv("FAKE", "kill-always", 1);
  const Outcome outcome = run_plan(options());
  EXPECT_EQ(outcome.done, 0);
  ASSERT_EQ(outcome.failures.size(), 4u);
  EXPECT_NE(outcome.failures[0].reason.find("killed by signal 9"), std::string::npos)
      << outcome.failures[0].reason;
  EXPECT_EQ(count(starts(), '\n'), 12) << "each is restarted twice";
}

TEST_F(Runner, FullDiskStopsTheStudyAndSaysHowToContinue) {
  ::setenv("FAKE", "full", 1);
  StudyOptions study = options();
  study.jobs = 1;
  const std::string text = message([&] { run_plan(study); });
  EXPECT_NE(text.find("the disk is full; the study was stopped after 0 of 4 runs"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("Free space and give the same command again"), std::string::npos) << text;
  EXPECT_EQ(count(starts(), '\n'), 1);
  ::setenv("FAKE", "", 1);
  EXPECT_EQ(run_plan(study).done, 4);
}

TEST_F(Runner, FullDatabaseIsReportedAsAFullDisk) {
  Database database(folder / "small.sqlite", Database::Mode::write);
  database.execute("CREATE TABLE t (x TEXT); PRAGMA max_page_count = 4");
  EXPECT_THROW(database.query("INSERT INTO t VALUES (?)", {std::string(100'000, 'x')}), DiskFull);
}

TEST_F(Runner, RefusedPlanLeavesNothingBehind) {
  std::string plan = with_equal_models();
  StudyOptions study = options(plan);
  study.study = folder / "new/study";
  EXPECT_NE(message([&] { run_plan(study); }).find("are the same run"), std::string::npos);
  EXPECT_NE(message([&] { dry_run(study); }).find("are the same run"), std::string::npos);
  EXPECT_FALSE(fs::exists(folder / "new"));
  make_folder(study.study / "configs");
  write_file(study.study / "configs/mine.toml", "kept");
  EXPECT_NE(message([&] { run_plan(study); }).find("are the same run"), std::string::npos);
  std::vector<fs::path> left(fs::recursive_directory_iterator(study.study), {});
  EXPECT_EQ(left.size(), 2u) << "the folder configs and the file mine.toml";
  EXPECT_EQ(read_file(study.study / "configs/mine.toml"), "kept");
}

TEST_F(Runner, RefusedPlanKeepsWhatOthersWrote) {
  run_plan(options());
  // The user writes files into the study while the first question is asked
  const std::string writes = "if [ \"$1\" = train ]; then\n" +
                             fmt::format(
                                 "  for file in new.txt configs/new.toml data/new.txt; do\n"
                                 "    echo kept > {}/$file\n  done\nfi\n",
                                 (folder / "study").string());
  std::string script = read_file(folder / "trainer");
  script.insert(script.find('\n') + 1, writes);
  write_file(folder / "trainer", script);
  fs::permissions(folder / "trainer", fs::perms::owner_all);
  std::string plan = with_equal_models();
  plan.replace(plan.find("documents = 4"), 13, "documents = 5");
  EXPECT_NE(message([&] { run_plan(options(plan)); }).find("are the same run"), std::string::npos);
  for (const char* file : {"new.txt", "configs/new.toml", "data/new.txt"})
    EXPECT_TRUE(fs::exists(folder / "study" / file)) << file;
  const auto stores = std::distance(fs::directory_iterator(folder / "study/data"), {});
  EXPECT_EQ(stores, 2) << "the data of the first plan and the file of the user";
  EXPECT_EQ(run_plan(options()).done_before, 4);
}

TEST_F(Runner, RefusedPlanLeavesConfigurationsAsTheyAre) {
  run_plan(options());
  const fs::path config = folder / "study/configs/full.seed-1.toml";
  const std::string before = read_file(config);
  std::string plan = with_equal_models();
  plan.replace(plan.find("4000"), 4, "8000");
  EXPECT_NE(message([&] { run_plan(options(plan)); }).find("are the same run"), std::string::npos);
  EXPECT_EQ(read_file(config), before);
}

TEST_F(Runner, EqualRunsOfATunedPlanAreRefusedBeforeTuning) {
  const std::string plan = kTune + with_equal_models();
  EXPECT_NE(message([&] { run_plan(options(plan)); }).find("are the same run"), std::string::npos);
  EXPECT_EQ(starts(), "");
}

TEST_F(Runner, BudgetsOfOneRoundedLabelHaveTheirOwnNames) {
  const std::string plan =
      std::string(kPlan) + "ladder = { tokens = [2000, 2400, 4000], seeds = [1, 2] }\n";
  EXPECT_EQ(run_plan(options(plan)).done, 8);
  std::map<std::string, int64_t> steps;
  Store store(folder / "study");
  for (const StudyRun& run : store.planned_runs())
    if (run.model == "full" && run.seed == 1) steps[run.name] = run.finished->outcome.steps;
  const std::map<std::string, int64_t> expected = {
      {"full.2000.seed-1", 5}, {"full.2400.seed-1", 6}, {"full.4k.seed-1", 10}};
  EXPECT_EQ(steps, expected);
}

TEST_F(Runner, BudgetsOfTheSameStepsAreRefusedWithThem) {
  const std::string plan =
      std::string(kPlan) + "ladder = { tokens = [3900, 4000], seeds = [1, 2] }\n";
  const std::string text = message([&] { dry_run(options(plan)); });
  EXPECT_NE(text.find("full.3900.seed-1 and full.4000.seed-1 are the same run; "
                      "both budgets are 10 steps, so remove one of them."),
            std::string::npos)
      << text;
}

TEST_F(Runner, CheckOfALearningRateIsNotNamedLikeARunOfTheGrid) {
  std::string plan = std::string(kPlan) + kTune;
  plan.replace(plan.rfind(" }"), 2, ", check = true }");
  plan.replace(plan.find("tokens = 4000, batch"), 13, "tokens = 8000");
  run_plan(options(plan));
  std::map<std::string, std::string> keys;
  for (const StudyRun& run : Store(folder / "study").planned_runs())
    EXPECT_EQ(keys.emplace(run.name, run.key).first->second, run.key) << run.name;
}

TEST_F(Runner, TunedModelIsTrainedForTheBudgetOfTrain) {
  std::string plan = std::string(kPlan) + kTune;
  plan.replace(plan.find("tokens = 4000, batch"), 13, "tokens = 8000");
  EXPECT_EQ(run_plan(options(plan)).done, 10);
  for (const StudyRun& run : Store(folder / "study").planned_runs())
    EXPECT_EQ(run.finished->outcome.tokens, run.purpose == purpose::kTuning ? 4000 : 8000)
        << run.name;
}

TEST_F(Runner, ModelsWithRunsOfOneNameAreRefused) {
  std::string plan = kPlan;
  plan.replace(plan.find("\"window\""), 8, "\"b.c\", \"c\"");
  const std::string tables =
      "[model.\"b.c\"]\nbase = \"full\"\nd_model = 16\n"
      "[model.c]\nbase = \"full\"\nd_model = 32\n"
      "[setting.a]\n[setting.\"a.b\"]\n";
  const std::string text = message([&] { run_plan(options(plan + tables)); });
  for (const char* part : {"model 'b.c' in setting 'a' and of model 'c' in setting 'a.b'",
                           "would have the same name, a.b.c."})
    EXPECT_NE(text.find(part), std::string::npos) << text;
  // The budget of one model is a part of the name of the other
  plan = kPlan;
  plan.replace(plan.find("\"window\""), 8, "\"full.4k\"");
  const std::string other = message([&] {
    run_plan(options(plan + "ladder = { tokens = [4000, 8000], seeds = [1, 2] }\n" +
                     "[model.\"full.4k\"]\nbase = \"full\"\nd_model = 16\n"));
  });
  EXPECT_NE(other.find("would have the same name, full.4k.seed-1."), std::string::npos) << other;
  EXPECT_EQ(starts(), "");
}

TEST_F(Runner, RunOfOtherDataThanPlannedIsNotStored) {
  ::setenv("FAKE", "other-data", 1);
  const Outcome outcome = run_plan(options());
  EXPECT_EQ(outcome.done, 0);
  ASSERT_EQ(outcome.failures.size(), 4u);
  EXPECT_NE(outcome.failures[0].reason.find("other data (fingerprint e, and d was planned)"),
            std::string::npos)
      << outcome.failures[0].reason;
  for (const StudyRun& run : Store(folder / "study").planned_runs()) EXPECT_FALSE(run.finished);
}

TEST_F(Runner, RunOfOtherNumericsOrLengthThanPlannedIsNotStored) {
  run_plan(options());
  const auto runs = dry_run(options());
  Store store(folder / "study");
  for (const auto change : {+[](PlannedRun& run) { run.estimate.numerics["gla"] = 1000; },
                            +[](PlannedRun& run) { run.estimate.steps = 11; }}) {
    PlannedRun run = runs[0];
    change(run);
    EXPECT_NE(message([&] { store.take(run, run.folder(folder / "study")); }).find("not those of"),
              std::string::npos);
  }
  store.take(runs[0], runs[0].folder(folder / "study"));
}

TEST_F(Runner, RunThatIsKilledAtItsExitIsDone) {
  ::setenv("FAKE", "kill-at-exit", 1);
  const Outcome outcome = run_plan(options());
  EXPECT_TRUE(outcome.failures.empty());
  EXPECT_EQ(outcome.done, 4);
  EXPECT_EQ(count(starts(), '\n'), 4) << "a complete run was started again";
}

TEST_F(Runner, OneFailureDoesNotStopTheOthers) {
  ::setenv("FAKE", "fail", 1);
  const Outcome outcome = run_plan(options());
  EXPECT_EQ(outcome.done, 2);
  ASSERT_EQ(outcome.failures.size(), 2u);
  EXPECT_NE(outcome.failures[0].reason.find("the loss is NaN at step 3"), std::string::npos)
      << outcome.failures[0].reason;
  EXPECT_TRUE(fs::exists(outcome.failures[0].log));
  ::setenv("FAKE", "", 1);
  EXPECT_EQ(run_plan(options()).done, 4) << "failed runs are tried again";
}

TEST_F(Runner, TakesARunThatEndedWhileNoRunnerWatched) {
  run_plan(options());
  fs::remove(folder / "study/study.sqlite");
  EXPECT_EQ(run_plan(options()).done_before, 4);
}

TEST_F(Runner, RefusesAStudyThatAnotherProcessWorksOn) {
  make_folder(folder / "study");
  const FolderLock lock(folder / "study");
  EXPECT_NE(message([&] { run_plan(options()); }).find("in use by process"), std::string::npos);
}

TEST_F(Runner, DryRunTrainsNothing) {
  const auto runs = dry_run(options());
  ASSERT_EQ(runs.size(), 4u);
  EXPECT_EQ(runs[0].estimate.parameters, 1000);
  EXPECT_EQ(starts(), "");
}

TEST_F(Runner, DryRunWritesNothing) {
  StudyOptions study = options();
  study.study = folder / "new/study";
  dry_run(study);
  EXPECT_FALSE(fs::exists(folder / "new"));
  run_plan(study);
  std::map<fs::path, fs::file_time_type> before;
  for (const auto& entry : fs::recursive_directory_iterator(study.study))
    before[entry.path()] = entry.last_write_time();
  study.set = {"seeds=[1, 2, 3]", "data.synthetic.documents=5"};
  EXPECT_EQ(dry_run(study).size(), 6u);
  for (const auto& entry : fs::recursive_directory_iterator(study.study)) {
    const std::string name = entry.path().filename();
    const bool serves_readers = name == ".lock" || name.starts_with("study.sqlite-");
    if (entry.is_regular_file() && !serves_readers)
      EXPECT_EQ(before[entry.path()], entry.last_write_time()) << entry.path();
  }
}

TEST_F(Runner, DryRunTellsFinishedRunsOfThisStudyAndOfOthers) {
  const StudyOptions tuned = options(std::string(kPlan) + kTune);
  run_plan(tuned);
  StudyOptions wider = tuned;
  wider.set = {"seeds=[1, 2, 3]"};
  StudyOptions elsewhere = wider;
  elsewhere.study = folder / "elsewhere";
  elsewhere.reuse = {folder / "study"};
  for (const auto& [options, reuses] : {std::pair{wider, false}, {elsewhere, true}}) {
    const auto runs = dry_run(options);
    ASSERT_EQ(runs.size(), 12u);
    for (const ExpectedRun& run : runs) {
      const std::string own = run.folder(options.study).path;
      EXPECT_EQ(run.found, run.seed == 3 ? "" : reuses ? (folder / "study").string() : own);
      if (run.purpose == purpose::kStudy)
        EXPECT_EQ(run.learning_rate, 0.002) << "the rate that the finished grid has chosen";
    }
  }
}

TEST_F(Runner, SettingsMultiplyTheRuns) {
  const auto runs = dry_run(
      options(std::string(kPlan) + "[setting.short]\ntrain = { tokens = 400 }\n[setting.long]\n"));
  ASSERT_EQ(runs.size(), 8u);
  EXPECT_NE(runs[0].toml, runs[4].toml);
}

TEST_F(Runner, TuningChoosesTheRateOfTheLowestHeldOutLoss) {
  const Outcome outcome = run_plan(options(std::string(kPlan) + kTune));
  EXPECT_EQ(outcome.planned, 10);
  EXPECT_EQ(outcome.done, 10);
  for (const StudyRun& run : Store(folder / "study").planned_runs())
    if (run.purpose == purpose::kStudy) EXPECT_EQ(run.learning_rate, 0.002) << run.name;
}

TEST_F(Runner, DivergedRateOfAGridIsNotChosenAndNoFailure) {
  ::setenv("FAKE", "diverge", 1);
  const Outcome outcome = run_plan(options(std::string(kPlan) + kTune));
  EXPECT_TRUE(outcome.failures.empty());
  EXPECT_EQ(outcome.done, 8);
}

TEST_F(Runner, CheckRunsHalfAndTwiceTheRate) {
  std::string tune = kTune;
  tune.replace(tune.find(" }"), 2, ", check = true }");
  const auto runs =
      (run_plan(options(std::string(kPlan) + tune)), Store(folder / "study").planned_runs());
  ASSERT_EQ(runs.size(), 14u);
  EXPECT_EQ(runs[10].purpose, purpose::kHalf);
  EXPECT_EQ(runs[10].learning_rate, 0.001);
  EXPECT_EQ(runs[13].purpose, purpose::kDouble);
  EXPECT_EQ(runs[13].model, "window");
}

TEST_F(Runner, IgnoredChildSignalOfTheParentDoesNotBlockTheStudy) {
  ::signal(SIGCHLD, SIG_IGN);
  EXPECT_EQ(run_plan(options()).done, 4);
  ::signal(SIGCHLD, SIG_DFL);
  Ending ending;
  EXPECT_NE(message([&] { ended(::getpid(), ending); }).find("No child processes"),
            std::string::npos);
  EXPECT_NE(message([&] { wait(::getpid()); }).find("No child processes"), std::string::npos);
}

TEST_F(Runner, StudyOfAnEarlierVersionIsRefused) {
  make_folder(folder / "study");
  Database(folder / "study/study.sqlite", Database::Mode::write)
      .execute("CREATE TABLE runs (key TEXT)");
  EXPECT_NE(message([&] { run_plan(options()); }).find("written by an earlier version of Assay"),
            std::string::npos);
}

TEST_F(Runner, RunWithoutEndLossesIsAFailureThatDoesNotStopTheOthers) {
  const auto runs = dry_run(options());
  const fs::path run = runs[0].folder(folder / "study").path;
  make_folder(run);
  for (const char* file : {"run.json", "done.json"}) write_file(run / file, "{}");
  write_file(run / "config.toml", "");
  write_file(run / "metrics.jsonl", "");
  const Outcome outcome = run_plan(options());
  EXPECT_EQ(outcome.done, 3);
  ASSERT_EQ(outcome.failures.size(), 1u);
  EXPECT_NE(outcome.failures[0].reason.find("holds no end.json"), std::string::npos);
}

// Ctrl-C reaches the runs once, they save, and the study goes on later.
TEST_F(Runner, InterruptSavesAndTheSameCommandContinues) {
  ::setenv("FAKE", "slow", 1);
  const StudyOptions study = options();
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
  for (int tries = 0; tries < 300 && count(starts(), '\n') < 2; ++tries)
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  ::kill(child, SIGINT);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), kInterrupted);
  EXPECT_EQ(Store(folder / "study").planned_runs()[0].status, status::kInterrupted);
  ::setenv("FAKE", "", 1);
  EXPECT_EQ(run_plan(study).done, 4);
  EXPECT_NE(starts().find(" 1\n"), std::string::npos) << "nothing was resumed: " << starts();
}

}  // namespace
}  // namespace assay::study
