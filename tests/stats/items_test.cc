// Intervals over items: known values, and the coverage that they have in simulation.
#include "stats/items.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/random.h"

namespace assay::stats {
namespace {

TEST(Items, WilsonsIntervalHasItsKnownValues) {
  EXPECT_NEAR(normal_quantile(0.95), 1.959963984540054, 1e-12);
  const Interval some = share_interval(7, 20, 0.95);
  const Interval none = share_interval(0, 10, 0.95);
  EXPECT_NEAR(some.low, 0.18119182410108206, 1e-12);
  EXPECT_NEAR(some.high, 0.5671457233147638, 1e-12);
  EXPECT_EQ(none.estimate, 0);
  EXPECT_EQ(none.low, 0);
  EXPECT_NEAR(none.high, 0.2775327998628892, 1e-12);
  EXPECT_EQ(share_interval(10, 10, 0.95).high, 1);
}

TEST(Items, StandardErrorIsThatOfTheSample) {
  const std::vector<double> values = {1, 2, 4};
  EXPECT_NEAR(standard_error(values), std::sqrt((16.0 / 9 + 1.0 / 9 + 25.0 / 9) / 2 / 3), 1e-12);
  EXPECT_TRUE(std::isinf(mean_interval(std::vector<double>{1}, 0.95).high));
}

// Two models of which one is right more often, on the same items: the errors are correlated.
double coverage(double right_a, double only_a, double only_b, int items, uint64_t seed) {
  const double truth = only_a - only_b;
  int covered = 0;
  constexpr int kStudies = 4000;
  Random random(seed, "coverage");
  for (int study = 0; study < kStudies; ++study) {
    std::vector<double> a;
    std::vector<double> b;
    for (int i = 0; i < items; ++i) {
      const double u = random.uniform();
      a.push_back(u < right_a + only_a);
      b.push_back(u < right_a || (u >= right_a + only_a && u < right_a + only_a + only_b));
    }
    const Interval found = paired_share_difference(a, b, 0.95);
    covered += found.low <= truth && truth <= found.high;
  }
  return double(covered) / kStudies;
}

TEST(Items, PairedDifferencesAreCovered) {
  for (const int items : {30, 100, 1000})
    for (const auto& [both, only_a, only_b] :
         {std::tuple{0.4, 0.1, 0.1}, {0.3, 0.2, 0.05}, {0.5, 0.02, 0.02}})
      EXPECT_GT(coverage(both, only_a, only_b, items, 1), 0.93)
          << items << " " << only_a << " " << only_b;
}

TEST(Items, EqualModelsHaveAnIntervalAroundZero) {
  const std::vector<double> same = {1, 0, 1, 1};
  const Interval found = paired_share_difference(same, same, 0.95);
  EXPECT_EQ(found.estimate, 0);
  EXPECT_LT(found.low, 0);
  EXPECT_GT(found.high, 0);
}

}  // namespace
}  // namespace assay::stats
