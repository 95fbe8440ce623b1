#include "run/training_loss.h"

#include <gtest/gtest.h>

#include <cmath>

namespace assay::run {
namespace {

TEST(TrainingLoss, FallingLossIsReadAtTheStep) {
  std::vector<TrainingLine> lines;
  for (int64_t step = 10; step <= 200; step += 10)
    lines.push_back({.step = step, .loss = 5 - 0.01 * (double(step) - 4.5)});
  EXPECT_NEAR(training_loss_at(lines, 100, 50, 150), 4, 1e-12);
  EXPECT_NEAR(training_loss_at(lines, 200, 150, 200), 3, 1e-12) << "one-sided at the end";
}

TEST(TrainingLoss, FewLinesGiveTheirMean) {
  EXPECT_NEAR(training_loss_at({{.step = 10, .loss = 3}}, 10, 0, 10), 3, 1e-12);
  EXPECT_TRUE(std::isnan(training_loss_at({}, 10, 0, 10)));
}

TEST(TrainingLoss, EveryEvaluationAfterTheFirstStepHasOne) {
  Metrics metrics;
  for (int64_t step = 10; step <= 200; step += 10)
    metrics.training.push_back({.step = step, .loss = 5 - 0.01 * (double(step) - 4.5)});
  for (const int64_t step : {0, 50, 100, 200}) metrics.evaluations.push_back({.step = step});
  const std::vector<double> losses = training_losses(metrics);
  ASSERT_EQ(losses.size(), 4u);
  EXPECT_TRUE(std::isnan(losses[0])) << "nothing was trained";
  EXPECT_EQ(losses[1], 4.5);
  EXPECT_EQ(losses[2], 4);
  EXPECT_EQ(losses[3], 3);
}

}  // namespace
}  // namespace assay::run
