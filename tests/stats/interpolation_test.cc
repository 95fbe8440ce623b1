#include "stats/interpolation.h"

#include <gtest/gtest.h>

namespace assay::stats {
namespace {

// The means of the first pilot.
const std::vector<double> kHeldOut{4.070, 3.530, 3.248, 3.077};
const std::vector<double> kLoss{4.837, 4.066, 3.764, 3.727};

double read(const RungCurve& curve, double h, const std::vector<double>& loss) {
  return weighted_sum(curve.weights(h), loss);
}

TEST(RungCurve, RungsAreReadExactly) {
  const RungCurve curve(kHeldOut, kLoss);
  for (size_t b = 0; b < kHeldOut.size(); ++b)
    EXPECT_NEAR(read(curve, kHeldOut[b], kLoss), kLoss[b], 1e-12);
}

TEST(RungCurve, WeightsAddUpToOne) {
  const RungCurve curve(kHeldOut, kLoss);
  const std::vector<double> ones(4, 1.0);
  for (const double h : {4.2, 3.8, 3.4, 3.1, 3.0}) EXPECT_NEAR(read(curve, h, ones), 1, 1e-12);
}

TEST(RungCurve, SteepAndFlatSegmentsDoNotOvershoot) {
  const RungCurve curve(kHeldOut, kLoss);
  double last = read(curve, 4.07, kLoss);
  for (double h = 4.06; h > 3.08; h -= 0.01) {
    const double loss = read(curve, h, kLoss);
    EXPECT_LE(loss, last + 1e-12) << h;
    last = loss;
  }
}

TEST(RungCurve, ParabolaIsReadExactly) {
  const std::vector<double> h{4, 3.5, 3.2};
  const auto parabola = [](double x) { return 1 + 0.2 * x * x; };
  const std::vector<double> loss{parabola(4), parabola(3.5), parabola(3.2)};
  const RungCurve curve(h, loss);
  for (const double x : {3.9, 3.6, 3.4, 3.25})
    EXPECT_NEAR(read(curve, x, loss), parabola(x), 1e-12) << x;
}

TEST(RungCurve, TwoRungsGiveALine) {
  const RungCurve curve({4, 3}, {5, 4.5});
  EXPECT_NEAR(read(curve, 3.5, {5, 4.5}), 4.75, 1e-12);
  EXPECT_NEAR(read(curve, 2.9, {5, 4.5}), 4.45, 1e-12);
  const RungCurve rising({4, 3}, {4.5, 5});
  EXPECT_NEAR(read(rising, 3.5, {4.5, 5}), 4.75, 1e-12);
}

TEST(RungCurve, DerivativesAgreeWithDifferences) {
  const double h = 3.4;
  const auto reading = RungCurve(kHeldOut, kLoss).read(h);
  const RungCurve curve(kHeldOut, kLoss);
  EXPECT_NEAR(weighted_sum(reading.slope, kLoss),
              (read(curve, h + 1e-3, kLoss) - read(curve, h - 1e-3, kLoss)) / 2e-3, 1e-4);
  for (size_t b = 0; b < kHeldOut.size(); ++b) {
    auto high = kHeldOut;
    auto low = kHeldOut;
    high[b] += 1e-3;
    low[b] -= 1e-3;
    const double slope = (read({high, kLoss}, h, kLoss) - read({low, kLoss}, h, kLoss)) / 2e-3;
    EXPECT_NEAR(weighted_sum(reading.by_rung[b], kLoss), slope, 1e-3) << b;
  }
}

}  // namespace
}  // namespace assay::stats
