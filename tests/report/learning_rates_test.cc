// Grids of learning rates, and the checks of the chosen ones.
#include <gtest/gtest.h>

#include "report_folder.h"

namespace assay::report {
namespace {

using stats::Verdict;
using ReportLearningRates = ReportFolder;

TEST_F(ReportLearningRates, TuningTableMarksTheChosenRate) {
  fake.rates = {1e-3, 2e-3, 4e-3};
  fake.diverging = "window";
  fake.write(folder);
  const Study study = analyse(folder);
  ASSERT_EQ(study.settings[0].grids.size(), 4u);
  for (const Grid& grid : study.settings[0].grids) {
    ASSERT_EQ(grid.points.size(), 3u) << grid.model;
    EXPECT_TRUE(grid.points[1].chosen);
    EXPECT_FALSE(grid.at_the_end());
    EXPECT_LT(grid.points[1].held_out_loss, grid.points[0].held_out_loss);
  }
  write_report(folder);
  const std::string csv = read_file(folder / "tables/learning-rates.csv");
  EXPECT_TRUE(contains(csv, "\nwindow,10000000,0.004,,0 of 1,")) << csv;
  EXPECT_TRUE(contains(csv, ",1 of 1,chosen\n")) << csv;
  EXPECT_FALSE(contains(html(), "is missing")) << "a rate that diverges is a result";
}

TEST_F(ReportLearningRates, GridThatTheStudySharesIsComplete) {
  fake.rates = {1e-3, 2e-3, 4e-3};
  fake.check = true;
  fake.contender_budgets = {10'000'000};  // the budget of the grid
  fake.write(folder);
  const Study study = analyse(folder);
  ASSERT_EQ(study.settings[0].grids.size(), 4u);
  for (const Grid& grid : study.settings[0].grids) EXPECT_EQ(grid.points.size(), 3u) << grid.model;
}

TEST_F(ReportLearningRates, RateAtTheEndOfTheGridIsAWarning) {
  fake.rates = {1e-3, 2e-3};
  fake.write(folder);
  EXPECT_TRUE(contains(facts(analyse(folder), "window"),
                       "The chosen learning rate of window is at the end of its grid"));
  EXPECT_TRUE(contains(html(), "chosen, at the end of the grid"));
}

TEST_F(ReportLearningRates, ChecksOfTheLearningRateHaveVerdicts) {
  fake.rates = {1e-3, 2e-3, 4e-3};
  fake.check = true;
  fake.write(folder);
  const Study study = analyse(folder);
  const auto& checks = architecture(study, "window").checks;
  ASSERT_EQ(checks.size(), 2u);
  for (const Check& check : checks) EXPECT_EQ(check.end.verdict, Verdict::degraded);
  EXPECT_TRUE(contains(facts(study, "window"), "The verdict is the same at half and at twice"));
  EXPECT_TRUE(architecture(study, "full").checks.empty());
}

TEST_F(ReportLearningRates, CheckOutsideTheLadderShowsItsLosses) {
  fake.rates = {1e-3, 2e-3, 4e-3};
  fake.check = true;
  fake.contender_budgets = {20'000'000, 320'000'000};
  fake.write(folder);
  const Study study = analyse(folder);
  const Architecture& window = architecture(study, "window");
  ASSERT_EQ(window.checks.size(), 2u);
  for (const Check& check : window.checks) {
    EXPECT_FALSE(check.end.has_delta);
    EXPECT_EQ(check.end.tokens, 320e6);
    EXPECT_GT(check.end.held_out, 3);
    EXPECT_GT(check.end.final_loss, check.end.held_out);
  }
  EXPECT_FALSE(contains(facts(study, "window"), "The verdict is the same"));
}

TEST_F(ReportLearningRates, ChecksThatAreMissingOrNotSettledAreNotCalledTheSame) {
  fake.rates = {1e-3, 2e-3, 4e-3};
  fake.check = true;
  fake.failing_purpose = study::purpose::kHalf;
  fake.write(folder);
  EXPECT_TRUE(contains(facts(analyse(folder), "window"),
                       "The verdict is the same at twice the learning rate."));
  fs::remove_all(folder);
  fake.failing_purpose = "";
  fake.seed_spread = 0.5;
  fake.write(folder);
  const Study study = analyse(folder);
  EXPECT_EQ(architecture(study, "window").end.verdict, Verdict::not_settled);
  EXPECT_FALSE(contains(facts(study, "window"), "The verdict is the same"));
}

}  // namespace
}  // namespace assay::report
