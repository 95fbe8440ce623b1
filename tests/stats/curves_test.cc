#include "stats/curves.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"

namespace assay::stats {
namespace {

Run run(const std::vector<double>& losses) {
  Run run{0, {}};
  for (size_t k = 0; k < losses.size(); ++k)
    run.curve.push_back({std::exp(double(k + 1)), losses[k], {}});
  return run;
}
Curve curve(const std::vector<double>& losses) { return curve_of(run(losses), 0); }

TEST(Curves, EvaluationsOutOfOrderBecomeOneStretchAtTheirMean) {
  const Curve c = curve({5, 4, 4.5, 3});
  ASSERT_EQ(c.size(), 3u);
  EXPECT_EQ(c[1].loss, 4.25);
  EXPECT_EQ(c[1].log_tokens, 2.5);
  EXPECT_EQ(c[1].first, 1u);
  EXPECT_EQ(c[1].count, 2u);
  EXPECT_EQ(curve({3, 3, 4}).size(), 1u) << "a curve that only rises is one stretch";
}

TEST(Curves, AfterTokensLeavesOutTheBeginning) {
  auto with_start = run({5, 4, 3});
  with_start.curve.insert(with_start.curve.begin(), {0, 10, {}});
  EXPECT_EQ(curve_of(with_start, 0).front().loss, 5)
      << "the untrained model is no part of the curve";
  EXPECT_EQ(curve_of(with_start, std::exp(1)).front().loss, 4);
  EXPECT_TRUE(curve_of(with_start, 1e9).empty());
}

TEST(Curves, EvaluationsMustBeInOrder) {
  auto wrong = run({5, 4, 3});
  std::swap(wrong.curve[0], wrong.curve[1]);
  EXPECT_THROW(curve_of(wrong, 0), BadInput);
}

TEST(Curves, WeightsOfTheMeanOverARange) {
  // 5 → 4.25 is 0.375 of the range, 4.25 → 3 is 0.625; each straight piece counts at its middle.
  EXPECT_EQ(mean_weights(curve({5, 4, 4.5, 3}), 4, {3, 5}),
            (std::vector<double>{0.1875, 0.25, 0.25, 0.3125}));
  EXPECT_EQ(mean_weights(curve({4, 2}), 2, {2.5, 3.5}), (std::vector<double>{0.5, 0.5}));
  EXPECT_EQ(mean_weights(curve({4, 2}), 2, {2, 3}), (std::vector<double>{0.25, 0.75}));
  EXPECT_EQ(mean_weights(curve({6, 5, 4, 3}), 4, {4, 5}), (std::vector<double>{0, 0.5, 0.5, 0}));
}

TEST(Curves, TokensAtALoss) {
  EXPECT_EQ(log_tokens_at(curve({4, 2}), 3), 1.5);
  EXPECT_EQ(log_tokens_at(curve({4, 2}), 4), 1);
  EXPECT_EQ(log_tokens_at(curve({4, 2}), 2), 2);
}

TEST(Curves, SharedRange) {
  const Range range = shared_range(std::vector<Curve>{curve({5, 4, 3}), curve({6, 3.5})});
  EXPECT_EQ(range.low, 3.5);
  EXPECT_EQ(range.high, 5);
}

TEST(Curves, ProblemsAreNamed) {
  const std::vector<Curve> late{curve({4, 3.5, 3})};
  const std::vector<Curve> early{curve({6, 5, 4.5})};
  const std::vector<Curve> touching{curve({6, 5, 3.95})};
  const std::vector<Curve> steep{curve({4.1, 2.9})};
  const std::vector<Curve> same{curve({4.1, 3.6, 3.1})};
  EXPECT_EQ(range_problem(late, same), "");
  EXPECT_EQ(range_problem(early, late),
            "the curves share no range of pre-training loss: "
            "every run of the architecture covers 6.000 to 4.500, of the reference 4.000 to 3.000");
  EXPECT_NE(range_problem(touching, late).find("less than a tenth"), std::string::npos);
  EXPECT_NE(range_problem(steep, late).find("fewer than two evaluations"), std::string::npos);
}

}  // namespace
}  // namespace assay::stats
