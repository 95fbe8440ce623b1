#include "stats/prediction.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "base/error.h"
#include "base/random.h"
#include "ladder_simulation.h"

namespace assay::stats {
namespace {

TEST(KendallTau, OrderIsCompared) {
  const std::vector<double> x{1, 2, 3, 4};
  EXPECT_EQ(kendall_tau(x, std::vector<double>{2, 4, 6, 8}), 1);
  EXPECT_EQ(kendall_tau(x, std::vector<double>{8, 6, 4, 2}), -1);
  EXPECT_NEAR(kendall_tau(x, std::vector<double>{1, 2, 4, 3}), 4.0 / 6, 1e-12);
}

TEST(KendallTau, IntervalNeedsFiveValues) {
  const std::vector<double> four = {1, 2, 3, 4};
  const std::vector<double> five = {1, 2, 3, 4, 5};
  EXPECT_TRUE(std::isnan(kendall_interval(four, four).estimate));
  const Interval perfect = kendall_interval(five, five);
  EXPECT_EQ(perfect.high, 1);
  EXPECT_NEAR(perfect.low, std::tanh(std::atanh(0.9) - 1.959964 * std::sqrt(0.437)), 1e-6);
  EXPECT_TRUE(std::isnan(kendall_interval(five, std::vector<double>(5, 1.0)).estimate));
}

// Pairs of a normal distribution with correlation 0.8, whose τ is 2/π arcsin 0.8.
TEST(KendallTau, IntervalIsCovered) {
  const double truth = 2 / std::numbers::pi * std::asin(0.8);
  for (const size_t models : {5u, 6u, 8u, 13u}) {
    Random random(3, "tau");
    int covered = 0;
    constexpr int kStudies = 2000;
    for (int study = 0; study < kStudies; ++study) {
      std::vector<double> x;
      std::vector<double> y;
      for (size_t i = 0; i < models; ++i) {
        x.push_back(random.normal());
        y.push_back(0.8 * x.back() + 0.6 * random.normal());
      }
      const Interval found = kendall_interval(x, y);
      covered += found.low <= truth && truth <= found.high;
    }
    EXPECT_GT(covered, 0.92 * kStudies) << models << " models";
  }
}

TEST(KendallTau, TiesAreCorrected) {
  const std::vector<double> x{1, 1, 2};
  const std::vector<double> y{1, 2, 3};
  EXPECT_NEAR(kendall_tau(x, y), 2 / std::sqrt(2.0 * 3), 1e-12);
  EXPECT_TRUE(std::isnan(kendall_tau(std::vector<double>{1, 1}, std::vector<double>{1, 2})));
  EXPECT_THROW(kendall_tau(x, std::vector<double>{1}), BadInput);
}

PredictionOptions last_budget(const LadderSetting& s) {
  const double target = LadderStudy::tokens_at(s.rungs - 1);
  return {.below_tokens = target, .target_tokens = target, .level = 0.9, .seeds = s.seeds};
}

// Share of later measurements inside the prediction intervals, per cent.
double predicted(const LadderSetting& s, int studies) {
  double inside = 0;
  double bias = 0;
  double half_width = 0;
  for (int r = 0; r < studies; ++r) {
    const LadderStudy study(s, uint64_t(r));
    const auto predictions = predict_ends(study.ladder, study.contenders, last_budget(s));
    const auto later = compare_ends(study.ladder, study.contenders, {.draws = 4096}).results;
    for (size_t a = 0; a < predictions.size(); ++a) {
      EXPECT_EQ(predictions[a].problem, "");
      const Interval& delta = predictions[a].delta;
      const double measured = later[a].delta.estimate;
      inside += delta.low <= measured && measured <= delta.high;
      bias += delta.estimate - measured;
      half_width += (delta.high - delta.low) / 2;
    }
  }
  const double all = double(studies) * s.contenders;
  fmt::print("| {:<40} | {:5.1f} | {:+.4f} | {:.3f} |\n", s.name, 100 * inside / all, bias / all,
             half_width / all);
  return 100 * inside / all;
}

TEST(Prediction, LaterMeasurementsAreInsideAtTheNominalRate) {
  const LadderSetting two{.name = "2 smaller budgets", .budgets = 3, .transition = 4.2};
  LadderSetting one = two;
  one.name = "1 smaller budget, no growth";
  one.budgets = 2;
  one.growth = 0;
  for (const LadderSetting& setting : {two, one}) {
    const double share = predicted(setting, 150);
    EXPECT_GE(share, 84) << setting.name;
    EXPECT_LE(share, 98) << setting.name;
  }
}

TEST(Prediction, OnlySmallerBudgetsAreUsed) {
  const LadderSetting setting{.name = "", .contenders = 1, .budgets = 3, .transition = 4.2};
  LadderStudy study(setting, 0);
  const auto before = predict_ends(study.ladder, study.contenders, last_budget(setting))[0];
  EXPECT_EQ(before.budgets, 2);
  study.contenders[0].budgets.pop_back();
  const auto after = predict_ends(study.ladder, study.contenders, last_budget(setting))[0];
  EXPECT_EQ(before.delta.low, after.delta.low);
  EXPECT_EQ(before.delta.estimate, after.delta.estimate);
}

TEST(Prediction, ContenderWithoutSmallerBudgetHasAProblem) {
  LadderStudy study({.name = "", .contenders = 1, .budgets = 1}, 0);
  const auto one = predict_ends(study.ladder, study.contenders, last_budget({}))[0];
  EXPECT_EQ(one.problem, "'contender 0' has no finished run; train one.");
  const auto none = predict_ends({}, study.contenders, last_budget({}))[0];
  EXPECT_NE(none.problem.find("The reference has 0 rung"), std::string::npos) << none.problem;
}

}  // namespace
}  // namespace assay::stats
