// Scores over items and seeds: known values, and the coverage of the intervals in simulation.
#include "stats/scores.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "base/random.h"
#include "stats/items.h"

namespace assay::stats {
namespace {

std::vector<double> answers(size_t right, size_t items) {
  std::vector<double> out(items, 0.0);
  for (size_t i = 0; i < right; ++i) out[3 * i % items] = 1;
  return out;
}

TEST(Scores, OneRunHasTheIntervalsOfItems) {
  const std::vector<double> a = answers(61, 100);
  const std::vector<double> b = answers(40, 100);
  const RunScores first = {run_score(a)};
  const RunScores second = {run_score(b)};
  const Interval share = score_interval(first, {}, ScoreKind::share);
  const Interval wilson = share_interval(61, 100, 0.95);
  EXPECT_NEAR(share.low, wilson.low, 1e-12);
  EXPECT_NEAR(share.high, wilson.high, 1e-12);
  const Interval difference = score_difference(first, second, {}, ScoreKind::share);
  const Interval bonett_price = paired_share_difference(a, b, 0.95);
  EXPECT_NEAR(difference.estimate, bonett_price.estimate, 1e-12);
  EXPECT_NEAR(difference.low, bonett_price.low, 1e-12);
  EXPECT_NEAR(difference.high, bonett_price.high, 1e-12);
  const std::vector<double> numbers = {1, 2, 4, 7.5};
  const Interval mean = score_interval({run_score(numbers)}, {}, ScoreKind::number);
  EXPECT_NEAR(mean.low, mean_interval(numbers, 0.95).low, 1e-12);
  EXPECT_NEAR(mean.high, mean_interval(numbers, 0.95).high, 1e-12);
}

TEST(Scores, MeanOverTasksWeighsTasksEqually) {
  const std::vector<RunScore> tasks = {run_score(answers(10, 10)), run_score(answers(0, 1000))};
  const RunScore mean = mean_score(tasks);
  EXPECT_EQ(mean.value, 0.5);
  EXPECT_EQ(mean.influence.size(), 1010u);
}

TEST(Scores, EqualAnswersOfAllRunsStillHaveAnInterval) {
  const RunScores never = {run_score(answers(0, 50)), run_score(answers(0, 50))};
  const SeedNoise noise = seed_noise(std::vector<RunScores>{never, never});
  EXPECT_EQ(noise.between.value, 0);
  EXPECT_EQ(noise.between.freedom, 2);
  const Interval share = score_interval(never, noise, ScoreKind::share);
  EXPECT_EQ(share.estimate, 0);
  EXPECT_GT(share.high, 0.05);
  const Interval difference = score_difference(never, never, noise, ScoreKind::share);
  EXPECT_LT(difference.low, -0.02);
  EXPECT_GT(difference.high, 0.02);
}

// Studies with a known truth: an item is answered with the logistic probability of ability + item +
// seed + noise of the run on the item.
struct Simulated {
  double seed_spread = 0.2;
  size_t seeds = 3;
  size_t items = 200;
  std::vector<double> abilities = {0.3, 0, -0.3, 0.6};  // of the reference and the contenders

  static double logistic(double x) { return 1 / (1 + std::exp(-x)); }
  // The share that a model of this ability has over all seeds and items.
  double truth(double ability) const {
    Random random(7, "truth");
    const double spread = std::sqrt(1 + seed_spread * seed_spread + 0.25);
    double sum = 0;
    constexpr int kDraws = 100'000;
    for (int i = 0; i < kDraws; ++i) sum += logistic(ability + spread * random.normal());
    return sum / kDraws;
  }

  std::vector<RunScores> draw(Random& random) const {
    std::vector<double> difficulty(items);
    for (double& one : difficulty) one = random.normal();
    std::vector<RunScores> models;
    for (const double ability : abilities) {
      RunScores& runs = models.emplace_back();
      for (size_t s = 0; s < seeds; ++s) {
        const double level = ability + seed_spread * random.normal();
        std::vector<double> right;
        for (const double item : difficulty)
          right.push_back(random.uniform() < logistic(level + item + 0.5 * random.normal()));
        runs.push_back(run_score(right));
      }
    }
    return models;
  }

  // Shares of intervals that hold the truth: of the contenders' scores, and of their differences.
  std::pair<double, double> coverage(int studies) const {
    std::vector<double> truths;
    for (const double ability : abilities) truths.push_back(truth(ability));
    Random random(11, "scores");
    double of_scores = 0;
    double of_differences = 0;
    const auto holds = [](const Interval& interval, double value) {
      return double(interval.low <= value && value <= interval.high);
    };
    for (int study = 0; study < studies; ++study) {
      const std::vector<RunScores> models = draw(random);
      const SeedNoise noise = seed_noise(models);
      for (size_t m = 1; m < models.size(); ++m) {
        of_scores += holds(score_interval(models[m], noise, ScoreKind::share), truths[m]);
        of_differences += holds(score_difference(models[m], models[0], noise, ScoreKind::share),
                                truths[m] - truths[0]);
      }
    }
    const double count = double(studies) * double(abilities.size() - 1);
    return {100 * of_scores / count, 100 * of_differences / count};
  }
};

TEST(ScoreCoverage, ScoresAndDifferencesAreCovered) {
  struct Row {
    const char* name;
    Simulated simulated;
  };
  const std::vector<Row> rows = {{"4 models, 3 seeds, 200 items", {}},
                                 {"2 seeds", {.seeds = 2}},
                                 {"seeds do not differ", {.seed_spread = 0}},
                                 {"seeds dominate", {.seed_spread = 0.6}},
                                 {"30 items", {.items = 30}},
                                 {"rare answers", {.abilities = {-3, -3.3, -3.6, -4}}},
                                 {"2 models, 2 seeds", {.seeds = 2, .abilities = {0.3, 0}}}};
  for (const auto& [name, simulated] : rows) {
    const auto [scores, differences] = simulated.coverage(400);
    std::printf("%-30s score %.1f %%, difference %.1f %%\n", name, scores, differences);
    EXPECT_GT(scores, 91) << name;
    EXPECT_GT(differences, 91) << name;
  }
}

}  // namespace
}  // namespace assay::stats
