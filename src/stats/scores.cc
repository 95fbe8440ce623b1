#include "stats/scores.h"

#include <algorithm>
#include <cmath>

#include "stats/interpolation.h"
#include "stats/items.h"
#include "stats/student.h"

namespace assay::stats {
namespace {

std::vector<double> mean_influence(const RunScores& runs) {
  std::vector<double> out(runs.front().influence.size());
  for (const RunScore& run : runs)
    for (size_t i = 0; i < out.size(); ++i) out[i] += run.influence[i] / double(runs.size());
  return out;
}

double mean_value(const RunScores& runs) {
  double sum = 0;
  for (const RunScore& run : runs) sum += run.value;
  return sum / double(runs.size());
}

// The t of an interval whose variance is the sum of both. Shares of many items are normal.
double quantile(const Variance& seeds, const Variance& items, ScoreKind kind, double level) {
  const double all = seeds.value + items.value;
  double inverse = 0;
  if (seeds.value > 0) inverse += seeds.value / all / seeds.freedom;
  if (items.value > 0 && kind == ScoreKind::number)
    inverse += items.value / all * (items.value / all) / items.freedom;
  return inverse > 0 ? student_quantile(level, 1 / inverse) : normal_quantile(level);
}

Interval around(double estimate, double centre, double half) {
  return {estimate, centre - half, centre + half};
}

}  // namespace

RunScore run_score(std::span<const double> values, std::span<const double> weights) {
  const std::vector<double> ones(weights.empty() ? values.size() : 0, 1.0);
  const std::span<const double> used = weights.empty() ? std::span<const double>(ones) : weights;
  return {ratio(values, used), document_influence(values, used)};
}

RunScore mean_score(std::span<const RunScore> tasks) {
  RunScore out;
  const auto count = double(tasks.size());
  for (const RunScore& task : tasks) {
    out.value += task.value / count;
    for (const double influence : task.influence) out.influence.push_back(influence / count);
  }
  return out;
}

SeedNoise seed_noise(std::span<const RunScores> models) {
  SeedNoise out;
  for (const RunScores& runs : models) {
    if (runs.size() < 2) continue;
    const double centre = mean_value(runs);
    const std::vector<double> shared = mean_influence(runs);
    for (const RunScore& run : runs) {
      out.between.value += (run.value - centre) * (run.value - centre);
      for (size_t i = 0; i < shared.size(); ++i) {
        const double rest = run.influence[i] - shared[i];
        out.interaction += rest * rest;
      }
    }
    out.between.freedom += double(runs.size()) - 1;
  }
  if (out.between.freedom == 0) return {};
  out.between.value /= out.between.freedom;
  out.interaction /= out.between.freedom;
  return out;
}

Interval score_interval(const RunScores& runs, const SeedNoise& noise, ScoreKind kind,
                        double level) {
  const auto count = double(runs.size());
  const std::vector<double> influence = mean_influence(runs);
  const auto items = double(influence.size());
  const double value = mean_value(runs);
  const bool share = kind == ScoreKind::share;
  // A share of n items has the variance r (1 − r) / n, without the n − 1 of a sample's variance.
  const double of_items = weighted_sum(influence, influence) * (share ? (items - 1) / items : 1);
  const Variance seeds{noise.between.value / count, noise.between.freedom};
  const Variance documents{std::max(0.0, of_items - noise.interaction / count),
                           std::max(1.0, items - 1)};
  const double variance = seeds.value + documents.value;
  const double t = quantile(seeds, documents, kind, level);
  if (!share)
    return items < 2 ? Interval{value, -INFINITY, INFINITY}
                     : around(value, value, t * std::sqrt(variance));
  const double spread = value * (1 - value);
  const double effective = spread > 0 && variance > 0 ? spread / variance : items;
  return wilson_interval(value, effective, t);
}

Interval score_difference(const RunScores& a, const RunScores& b, const SeedNoise& noise,
                          ScoreKind kind, double level) {
  const double runs = 1 / double(a.size()) + 1 / double(b.size());
  std::vector<double> influence = mean_influence(a);
  const std::vector<double> other = mean_influence(b);
  for (size_t i = 0; i < influence.size(); ++i) influence[i] -= other[i];
  const auto items = double(influence.size());
  const double value = mean_value(a) - mean_value(b);
  const bool share = kind == ScoreKind::share;
  double centre = value;
  double of_items = weighted_sum(influence, influence);
  if (share) {  // with two more items, whose differences are 1 and −1
    const double square = (of_items * (items - 1) + value * value) * items;
    centre = value * items / (items + 2);
    of_items = ((square + 2) / (items + 2) - centre * centre) / (items + 2);
  }
  const Variance seeds{noise.between.value * runs, noise.between.freedom};
  const Variance documents{std::max(0.0, of_items - noise.interaction * runs),
                           std::max(1.0, items - 1)};
  if (!share && items < 2) return {value, -INFINITY, INFINITY};
  const double half =
      quantile(seeds, documents, kind, level) * std::sqrt(seeds.value + documents.value);
  Interval out = around(value, centre, half);
  if (!share) return out;
  out.low = std::max(-1.0, out.low);
  out.high = std::min(1.0, out.high);
  return out;
}

}  // namespace assay::stats
