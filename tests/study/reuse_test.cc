#include "study/reuse.h"

#include <sys/wait.h>
#include <unistd.h>

#include "fake_trainer.h"

namespace assay::study {
namespace {

using Reuse = FakeStudy;

TEST_F(Reuse, FinishedRunsOfAnotherFolderAreReused) {
  run_plan(options());
  EXPECT_EQ(write_records(folder / "study", folder / "records"), 4);
  for (const char* source : {"study", "records"}) {
    StudyOptions again = options();
    again.study = folder / fmt::format("again-{}", source);
    again.reuse = {folder / source};
    const Outcome outcome = run_plan(again);
    EXPECT_EQ(outcome.reused, 4) << source;
    EXPECT_EQ(count(starts(), '\n'), 4) << "a finished run was repeated";
    Store store(again.study);
    const auto runs = store.planned_runs();
    EXPECT_EQ(runs[0].origin, (folder / source).string());
    const run::FinishedRun found = store.finished(runs[0].key);
    EXPECT_EQ(found.end.sets.at("fresh_a.test").loss, 4.1);
    EXPECT_EQ(found.metrics.evaluations[0].evaluation.at("a.test").loss, 4.1);
  }
}

TEST_F(Reuse, RecordsOfOtherDataOrNumericsAreExplained) {
  run_plan(options());
  write_records(folder / "study", folder / "records");
  std::vector<PlannedRun> runs;
  for (const ExpectedRun& run : dry_run(options())) runs.push_back(run);
  const Reusable reusable({folder / "records"});
  EXPECT_EQ(reusable.explain_missing(runs), "");
  runs[0].key = runs[1].key = "other";
  EXPECT_EQ(reusable.explain_missing(runs),
            fmt::format("2 of 4 runs have only a record of the same name that is not reused. "
                        "full.seed-1 of {}: its configuration, learning rate or defaults differ",
                        (folder / "records").string()));
  runs[0].estimate.numerics = {{"glu", 2}};
  EXPECT_NE(reusable.explain_missing(runs).find("glu has numerics version 1 there and 2 here"),
            std::string::npos);
  runs[0].estimate.data = "another fingerprint";
  EXPECT_NE(reusable.explain_missing(runs).find("fingerprint d, and this store has another "),
            std::string::npos);
  for (PlannedRun& run : runs) run.name = "new";
  EXPECT_EQ(reusable.explain_missing(runs), "");
}

TEST_F(Reuse, StudyIsMadeOfRecordsAlone) {
  run_plan(options());
  write_records(folder / "study", folder / "records");
  study_of_records(folder / "records", folder / "copy");
  Store copy(folder / "copy", Database::Mode::read);
  ASSERT_EQ(copy.planned_runs().size(), 4u);
  EXPECT_EQ(copy.planned_runs()[2].status, status::kDone);
  EXPECT_EQ(copy.plan().reference, "full");
  EXPECT_NE(message([&] {
              study_of_records(folder / "models", folder / "none");
            }).find("holds neither a study"),
            std::string::npos);
}

TEST_F(Reuse, RecordsAndRunsDoNotReplaceEachOther) {
  run_plan(options());
  write_records(folder / "study", folder / "records");
  StudyOptions other = options();
  other.study = folder / "other";
  other.reuse = {folder / "records"};
  run_plan(other);
  const auto refused = [&](const fs::path& study) {
    return message([&] { study_of_records(folder / "records", study); });
  };
  for (const char* study : {"study", "other"}) {
    EXPECT_NE(refused(folder / study).find("was not made from records"), std::string::npos);
    EXPECT_EQ(Store(folder / study).planned_runs()[3].status, status::kDone) << study;
  }
  EXPECT_NE(refused(folder / "records").find("needs a folder of its own"), std::string::npos);
  EXPECT_FALSE(fs::exists(folder / "records/study.sqlite"));
  for (int times = 0; times < 2; ++times) EXPECT_EQ(refused(folder / "copy"), "no error");
  other.study = folder / "copy";
  EXPECT_NE(message([&] { run_plan(other); }).find("was made from records"), std::string::npos);
  EXPECT_EQ(refused(folder / "copy"), "no error");
  const FolderLock lock(folder / "copy");
  EXPECT_NE(refused(folder / "copy").find("in use by process"), std::string::npos);
}

TEST_F(Reuse, RecordsOfAFolderGoBeforeThoseOfOthers) {
  run_plan(options());
  write_records(folder / "study", folder / "records/old");
  write_records(folder / "study", folder / "records/new");
  for (const auto& entry : fs::directory_iterator(folder / "records/old")) {
    if (entry.path().filename() == "plan.json") continue;
    Json record = parse_json(read_file(entry.path()), "record");
    record["provenance"]["commit"] = "old";
    write_file(entry.path(), record.dump());
  }
  // Both folders have all records, and the new one names the old one
  Json plan = parse_json(read_file(folder / "records/new/plan.json"), "plan");
  plan["records"] = {"../old"};
  write_file(folder / "records/new/plan.json", plan.dump());
  for (const auto& [key, record] : read_records(folder / "records/new"))
    EXPECT_EQ(record.provenance.commit, "c") << record.name;
  for (const auto& [key, record] : read_records(folder / "records/old"))
    EXPECT_EQ(record.provenance.commit, "old") << record.name;
}

TEST_F(Reuse, RecordsWithThePlanFileOfOtherRecordsAreRejected) {
  run_plan(options());
  write_records(folder / "study", folder / "records");
  const fs::path file = folder / "records/plan.json";
  Json plan = parse_json(read_file(file), "plan");
  EXPECT_EQ(plan["shared"]["provenance"]["commit"], "c") << "once for all records";
  plan["shared"]["provenance"]["commit"] = "other";
  write_file(file, plan.dump());
  EXPECT_NE(message([&] {
              read_records(folder / "records");
            }).find(".json: The record was written with another plan.json"),
            std::string::npos);
}

TEST_F(Reuse, RecordsHaveOnlyTheLossesThatReportsRead) {
  std::string plan = kPlan;
  plan.replace(plan.find("[\"fresh_a\"]"), 11, "[\"fresh_b\"], further = [\"fresh_a\"]");
  run_plan(options(plan));
  write_records(folder / "study", folder / "records");
  for (const auto& [key, record] : read_records(folder / "records")) {
    const auto& sets = record.end.sets;
    EXPECT_FALSE(record.evaluations.losses.contains("fresh_a.test")) << record.name;
    EXPECT_TRUE(sets.at("fresh_a.test").clusters.recall_nll.empty()) << record.name;
    EXPECT_FALSE(sets.at("fresh_a.test").clusters.nll.empty()) << record.name;
    EXPECT_FALSE(sets.at("known_a.valid").clusters.recall_nll.empty()) << record.name;
  }
}

// Exit code of a process without the rights of root that calls `work`.
int exit_code_without_rights(auto&& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (::geteuid() == 0 && ::setuid(65534) != 0) ::_exit(2);
    try {
      ::_exit(work() ? 0 : 1);
    } catch (const std::exception& error) {
      fmt::print(stderr, "{}\n", error.what());
      ::_exit(1);
    }
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WEXITSTATUS(status);
}

TEST_F(Reuse, StudyThatCannotBeWrittenIsReused) {
  run_plan(options());
  const fs::path moved = folder / "a study, 100% done? #1";
  fs::rename(folder / "study", moved);
  fs::permissions(folder, fs::perms(0755));
  fs::permissions(moved, fs::perms(0555));
  EXPECT_EQ(exit_code_without_rights([&] { return read_records(moved).size() == 4; }), 0);
  // A log that a killed writer left belongs to the database
  write_file(moved / "study.sqlite-wal", "");
  EXPECT_NE(exit_code_without_rights([&] { return read_records(moved).size() == 4; }), 0);
  fs::permissions(moved, fs::perms(0755));
}

TEST_F(Reuse, RecordsOfAnotherFolderAreNotWrittenTwice) {
  run_plan(options());
  write_records(folder / "study", folder / "records/all");
  StudyOptions wider = options();
  wider.study = folder / "wider";
  wider.set = {"seeds=[1, 2, 3]"};
  wider.reuse = {folder / "records/all"};
  run_plan(wider);
  EXPECT_EQ(write_records(folder / "wider", folder / "records/wider", {folder / "records/all"}), 2);
  study_of_records(folder / "records/wider", folder / "copy");
  Store copy(folder / "copy", Database::Mode::read);
  ASSERT_EQ(copy.planned_runs().size(), 6u);
  for (const StudyRun& run : copy.planned_runs()) EXPECT_EQ(run.status, "done") << run.name;
  wider.study = folder / "again";
  wider.reuse = {folder / "records/wider"};
  EXPECT_EQ(run_plan(wider).reused, 6) << "records of the other folder are reused with it";
}

TEST_F(Reuse, FolderWithoutRecordsIsRefusedForReuse) {
  StudyOptions study = options();
  study.reuse = {folder / "models"};
  EXPECT_NE(message([&] { run_plan(study); }).find("holds no study.sqlite and no record of a run"),
            std::string::npos);
  EXPECT_EQ(starts(), "");
}

}  // namespace
}  // namespace assay::study
