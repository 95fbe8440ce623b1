#include "stats/uncertainty.h"

#include <gtest/gtest.h>

namespace assay::stats {
namespace {

TEST(Uncertainty, SeedVarianceIsPooledOverArchitectures) {
  const ByRun runs{{1, 3}, {2, 2, 5}, {7}};  // squares: 2 with 1 degree of freedom, 6 with 2, none
  EXPECT_DOUBLE_EQ(seed_variance(runs).value, 8.0 / 3);
  EXPECT_EQ(seed_variance(runs).freedom, 3);
  EXPECT_DOUBLE_EQ(seed_variance_of_difference(runs).value, 8.0 / 3 * (1.0 / 2 + 1.0 / 3));
  EXPECT_EQ(seed_variance(ByRun{{1}, {2}}).freedom, 0);
}

TEST(Uncertainty, DocumentsOfOneLengthGiveTheVarianceOfAMean) {
  const std::vector<double> y{1, 3, 5, 11};
  const std::vector<double> tokens{2, 2, 2, 2};
  EXPECT_DOUBLE_EQ(ratio(y, tokens), 2.5);
  // S² / n, over 2² tokens
  EXPECT_NEAR(document_variance(y, tokens).value, (16 + 4 + 0 + 36) / 3.0 / 4 / 4, 1e-12);
  EXPECT_DOUBLE_EQ(document_variance(y, tokens).freedom, 3);
}

TEST(Uncertainty, DocumentsOfUnequalLength) {
  // Σt = 4, ratio 1.5; residuals (1 − 1.5)/4, (0.5 − 1.5)/4 … weights 1/4, 1/4, 1/2, Σw² = 3/8.
  const std::vector<double> y{1, 0.5, 4.5};
  const std::vector<double> tokens{1, 1, 2};
  const double by_hand =
      (0.125 * 0.125 + 0.25 * 0.25) / (1 - 0.5 + 0.375) + 0.375 * 0.375 / (1 - 1 + 0.375);
  EXPECT_DOUBLE_EQ(document_variance(y, tokens).value, by_hand);
  EXPECT_DOUBLE_EQ(document_variance(y, tokens).freedom, 8.0 / 3 - 1);
  EXPECT_DOUBLE_EQ(
      document_variance(std::vector<double>{1, 0.5, 4.5, 0}, std::vector<double>{1, 1, 2, 0}).value,
      by_hand)
      << "a document without tokens counts for nothing";
}

TEST(Uncertainty, SumOfVariances) {
  const std::vector<Variance> parts{{1, 4}, {3, 9}};
  EXPECT_EQ(sum(parts).value, 4);
  EXPECT_DOUBLE_EQ(sum(parts).freedom, 16 / (1.0 / 4 + 1));
}

TEST(Uncertainty, IntervalsUseStudentsT) {
  EXPECT_NEAR(interval(1, {4, 2}, {0, 7}, 0.95).high, 1 + 2 * 4.30265273, 1e-7);
  EXPECT_NEAR(interval(1, {0, 0}, {4, 10}, 0.95).low, 1 - 2 * 2.22813885, 1e-7);
  EXPECT_NEAR(interval(0, {0.5, 2}, {0.5, 1e12}, 0.95).high, 2.77644511, 1e-7)
      << "1/ν = ½ · ½ + 0: 4 degrees of freedom";
  EXPECT_EQ(interval(1, {0, 2}, {0, 3}, 0.95).low, 1);
}

}  // namespace
}  // namespace assay::stats
