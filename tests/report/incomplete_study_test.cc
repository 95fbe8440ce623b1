// Studies that lack runs, seeds, budgets or sources.
#include <gtest/gtest.h>

#include "base/error.h"
#include "report_folder.h"

namespace assay::report {
namespace {

using stats::Verdict;
using ReportOfIncompleteStudy = ReportFolder;

TEST_F(ReportOfIncompleteStudy, MissingLadderIsNotSettledWithAdvice) {
  fake.budgets = {40'000'000};
  fake.contender_budgets = {40'000'000};
  fake.write(folder);
  const Study study = analyse(folder);
  const stats::EndResult& window = architecture(study, "window").end;
  EXPECT_EQ(window.verdict, Verdict::not_settled);
  EXPECT_TRUE(contains(window.reason, "The reference was trained at one budget (40M tokens)"));
  EXPECT_TRUE(contains(window.reason,
                       "Add `ladder = { tokens = [5_000_000, 10_000_000, "
                       "20_000_000, 40_000_000], seeds = [1, 2, 3, 4] }` to the plan"))
      << window.reason;
  EXPECT_NEAR(window.final_loss - window.reference_loss, 0.12, 0.05);
  const std::string page = html();
  EXPECT_TRUE(contains(top(page), "not settled"));
  EXPECT_TRUE(contains(page, "No verdict is possible."));
}

TEST_F(ReportOfIncompleteStudy, AdvisedRungsHaveAtLeastOneStep) {
  constexpr int64_t kStep = 32 * 512;
  for (const auto& [budget, rungs] : std::vector<std::pair<int64_t, std::string>>{
           {kStep, "[16_384, 32_768, 65_536, 131_072]"},
           {4 * kStep, "[16_384, 32_768, 65_536, 131_072]"},
           {16 * kStep, "[32_768, 65_536, 131_072, 262_144]"}}) {
    fs::remove_all(folder);
    fake.budgets = {budget};
    fake.contender_budgets = {budget};
    fake.write(folder);
    const std::string reason = architecture(analyse(folder), "window").end.reason;
    EXPECT_TRUE(contains(reason, "Add `ladder = { tokens = " + rungs)) << reason;
  }
}

TEST_F(ReportOfIncompleteStudy, PlannedLadderIsNotAdvised) {
  fake.budgets = {40'000'000};
  fake.contender_budgets = {40'000'000};
  fake.write(folder);
  study::Database(folder / "study.sqlite", study::Database::Mode::write)
      .execute("UPDATE plan SET plan = json_set(plan, '$.has_ladder', json('true'))");
  const Study study = analyse(folder);
  const std::string& reason = architecture(study, "window").end.reason;
  EXPECT_TRUE(contains(reason, "Of the reference's ladder, one budget (40M tokens)")) << reason;
  EXPECT_TRUE(contains(reason, "The same `assay run` command trains")) << reason;
}

TEST_F(ReportOfIncompleteStudy, JsonWithoutLadderHasNulls) {
  fake.budgets = {20'000'000};
  fake.contender_budgets = {40'000'000};
  fake.write(folder);
  const nlohmann::json window = write_report(folder).verdicts[0];
  EXPECT_EQ(window["verdict"], "not settled");
  for (const char* key : {"delta_end", "trend", "reference_loss"})
    EXPECT_TRUE(window[key].is_null()) << key;
  EXPECT_TRUE(window["interval"][0].is_null());
  EXPECT_TRUE(window["final_loss"].is_number());
}

TEST_F(ReportOfIncompleteStudy, MissingRunsAreNamed) {
  fake.seeds = {1, 2};
  fake.write(folder, {"mamba1"});
  const std::string page = html();
  EXPECT_TRUE(contains(page,
                       "Run mamba1.20M.lr-0.001.seed-1 is missing (failed: exit code 1: "
                       "the loss is NaN at step 3)."));
  EXPECT_TRUE(contains(top(page),
                       "These models of the plan have no finished run, "
                       "so the tables and figures of results leave them out: mamba1."));
  EXPECT_FALSE(contains(page, "Runs that are missing in addition")) << "four runs are named";
  EXPECT_TRUE(contains(top(page), "</svg>degraded</span>"));
  EXPECT_FALSE(contains(page, ">mamba1</th>"));
}

TEST_F(ReportOfIncompleteStudy, MissingReferenceIsNotSettled) {
  fake.write(folder, {"full"});
  EXPECT_EQ(architecture(analyse(folder), "window").end.reason,
            "The reference has no finished run.");
  const std::string page = html();
  EXPECT_TRUE(contains(page, "The reference has no finished run."));
  EXPECT_FALSE(contains(page, "These models of the plan have no finished run"));
  EXPECT_TRUE(contains(page, "Runs that are missing in addition to these: 11.")) << "5 of 16 named";
  EXPECT_TRUE(contains(page, "Symbols: <span")) << "no comma before the first entry";
}

TEST_F(ReportOfIncompleteStudy, OneSeedEverywhereIsNotSettled) {
  fake.seeds = {1};
  fake.write(folder);
  EXPECT_EQ(architecture(analyse(folder), "window").end.verdict, Verdict::not_settled);
  EXPECT_TRUE(contains(html(), "No rung of the reference has two seeds"));
}

TEST_F(ReportOfIncompleteStudy, DocumentsWithoutSourcesAreACaution) {
  fake.has_sources = false;
  fake.write(folder);
  const std::string page = html();
  EXPECT_TRUE(contains(page, "the intervals hold for these texts only"));
  EXPECT_TRUE(contains(page, "Documents per domain: arxiv 40"));
}

TEST_F(ReportOfIncompleteStudy, OtherNumericsVersionsAreNotCompared) {
  fake.numerics["window"] = 2;
  fake.write(folder);
  const Study study = analyse(folder);
  EXPECT_EQ(architecture(study, "window").end.reason,
            "The runs differ in the numerics version of selective_scan (1 and 2). "
            "Run the older ones again.");
  EXPECT_TRUE(architecture(study, "window").comparisons.empty());
  EXPECT_EQ(architecture(study, "mamba1").end.verdict, Verdict::degraded);
}

TEST_F(ReportOfIncompleteStudy, OtherDocumentsAtTheEndConcernOneModelOnly) {
  fake.few_documents = "window";
  fake.write(folder);
  const Study study = analyse(folder);
  const Architecture& window = architecture(study, "window");
  EXPECT_EQ(window.end.verdict, Verdict::not_settled);
  EXPECT_TRUE(contains(window.end.reason, "different documents of arxiv.test at their end"))
      << window.end.reason;
  EXPECT_FALSE(window.comparisons.empty()) << "evaluations along training have the same documents";
  EXPECT_EQ(architecture(study, "mamba1").end.verdict, Verdict::degraded);
  EXPECT_FALSE(contains(html(), "No verdict is possible"));
}

TEST_F(ReportOfIncompleteStudy, FolderWithoutFinishedRunsIsAnError) {
  EXPECT_THROW(write_report(folder), BadInput);
  fake.write(folder, {"full", "window", "twin", "mamba1"});
  EXPECT_THROW(write_report(folder), BadInput);
  EXPECT_FALSE(fs::exists(folder / "report.html"));
}

}  // namespace
}  // namespace assay::report
