#include "stats/student.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

namespace assay::stats {
namespace {

TEST(Student, QuantilesOfTheTables) {
  EXPECT_NEAR(student_quantile(0.95, 1), 12.7062047364, 1e-8);
  EXPECT_NEAR(student_quantile(0.95, 2), 4.3026527297, 1e-9);
  EXPECT_NEAR(student_quantile(0.95, 3), 3.1824463053, 1e-9);
  EXPECT_NEAR(student_quantile(0.99, 10), 3.1692726726, 1e-9);
  EXPECT_NEAR(student_quantile(0.95, 1e7), 1.9599642, 1e-6);  // the normal distribution
}

TEST(Student, ClosedFormsOfOneAndTwoDegrees) {
  for (const double t : {0.0, 1e-3, 0.5, 1.0, 4.0, 1e3}) {
    EXPECT_NEAR(student_two_sided(t, 1), 1 - 2 / std::numbers::pi * std::atan(t), 1e-12) << t;
    EXPECT_NEAR(student_two_sided(t, 2), 1 - t / std::sqrt(2 + t * t), 1e-12) << t;
  }
}

TEST(Student, TheQuantileInvertsTheProbability) {
  for (const double freedom : {1.0, 1.7, 2.5, 8.3, 120.0})
    for (const double level : {0.01, 0.5, 0.95, 0.999})
      EXPECT_NEAR(student_two_sided(student_quantile(level, freedom), freedom), 1 - level, 1e-11)
          << freedom;
}

}  // namespace
}  // namespace assay::stats
