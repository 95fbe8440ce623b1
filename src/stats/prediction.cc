#include "stats/prediction.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "stats/contrast.h"
#include "stats/items.h"
#include "stats/reference.h"

namespace assay::stats {
namespace {

std::vector<Contender> below(std::vector<Contender> contenders, double tokens) {
  for (Contender& contender : contenders)
    std::erase_if(contender.budgets, [&](const Budget& b) { return !(b.tokens < tokens); });
  return contenders;
}

Prediction predict(const Ends& ends, const std::vector<Contrast>& differences,
                   const std::vector<double>& tokens, const PredictionOptions& options) {
  std::vector<double> x;
  for (const double t : tokens) x.push_back(std::log2(t));
  const double centre = mean(x);
  double squares = 0;
  for (const double value : x) squares += (value - centre) * (value - centre);
  const double ahead = std::log2(options.target_tokens) - centre;
  std::vector<double> weights;
  for (const double value : x)
    weights.push_back(1 / double(x.size()) +
                      (x.size() > 1 ? ahead * (value - centre) / squares : 0));
  const Estimate past = ends.estimate(combine(differences, weights), {});
  if (!past.known)
    return {.problem =
                "No model has two seeds at a smaller budget, so the error is unknown. "
                "Train a second seed of one model or name a table of variances."};

  // The future run has new seeds; the reference's error there is taken to be that of the last one.
  Estimate future = ends.estimate(differences.back(), {});
  const Variance one = ends.contender_variance({}, Line::curve);
  future.noise.seeds.back().amplitude = std::sqrt(one.value / double(options.seeds));
  Member both = past.noise;
  both.seeds.insert(both.seeds.end(), future.noise.seeds.begin(), future.noise.seeds.end());
  const Variance seeds = seed_variance(both, past.freedom);
  Prediction prediction;
  prediction.budgets = int64_t(tokens.size());
  prediction.largest = tokens.back();
  prediction.target_tokens = options.target_tokens;
  prediction.delta = interval(past.value, seeds, {}, options.level);
  return prediction;
}

}  // namespace

std::vector<Prediction> predict_ends(const std::vector<Budget>& ladder,
                                     const std::vector<Contender>& contenders,
                                     const PredictionOptions& options) {
  if (options.seeds < 1) fail("seeds is {}; expected 1 or more", options.seeds);
  if (!(options.target_tokens > 0))
    fail("target_tokens is {}; expected a number above zero", options.target_tokens);
  const std::vector<Contender> small = below(contenders, options.below_tokens);
  // For the problems and caveats of the budgets; its intervals are not read.
  LadderOptions limits = options.limits;
  limits.draws = 1;
  const LadderResult measured = compare_ends(ladder, small, limits);
  std::vector<Prediction> predictions;
  for (const EndResult& result : measured.results) {
    predictions.push_back(
        {.name = result.name, .problem = measured.problem, .target_tokens = options.target_tokens});
    if (measured.problem.empty() && !result.has_delta)
      predictions.back().problem = result.not_judged;
  }
  if (!measured.problem.empty()) {
    for (const Contender& contender : contenders)
      predictions.push_back({.name = contender.name,
                             .problem = measured.problem,
                             .target_tokens = options.target_tokens});
    return predictions;
  }
  Ends ends(in_order(ladder));
  ends.set_table(rows_of_others(limits, small));
  std::vector<std::vector<size_t>> groups(small.size());
  std::vector<std::vector<double>> tokens(small.size());
  for (size_t a = 0; a < small.size(); ++a) {
    const std::vector<Budget> budgets = in_order(small[a].budgets);
    const auto& results = measured.results[a].budgets;
    const bool any_usable = std::ranges::any_of(
        results, [](const BudgetResult& r) { return r.problem.empty() && r.caveat.empty(); });
    for (size_t j = 0; j < results.size(); ++j) {  // empty when a run has no finite loss
      const size_t group = ends.add(budgets[j], small[a].name);
      if (!results[j].problem.empty() || (any_usable && !results[j].caveat.empty())) continue;
      groups[a].push_back(group);
      ends.set_usable(group);
      tokens[a].push_back(budgets[j].tokens);
    }
  }
  for (size_t a = 0; a < small.size(); ++a) {
    if (!predictions[a].problem.empty()) continue;
    std::vector<Contrast> differences;
    for (const size_t group : groups[a]) differences.push_back(ends.difference(group, {}));
    predictions[a] = predict(ends, differences, tokens[a], options);
    predictions[a].name = small[a].name;
  }
  return predictions;
}

double kendall_tau(std::span<const double> x, std::span<const double> y) {
  if (x.size() != y.size())
    fail("kendall_tau got {} and {} values; expected as many of both", x.size(), y.size());
  const auto sign = [](double v) { return (v > 0) - (v < 0); };
  double concordance = 0;
  double pairs_x = 0;
  double pairs_y = 0;
  for (size_t i = 0; i < x.size(); ++i)
    for (size_t j = 0; j < i; ++j) {
      const int of_x = sign(x[i] - x[j]);
      const int of_y = sign(y[i] - y[j]);
      concordance += of_x * of_y;
      pairs_x += of_x != 0;
      pairs_y += of_y != 0;
    }
  return concordance / std::sqrt(pairs_x * pairs_y);
}

Interval kendall_interval(std::span<const double> x, std::span<const double> y, double level) {
  const double tau = kendall_tau(x, y);
  const auto n = double(x.size());
  if (x.size() < kFewestRanks || !std::isfinite(tau)) return {NAN, NAN, NAN};
  const double most = 1 - 2 / (n * (n - 1));
  const double middle = std::atanh(std::clamp(tau, -most, most));
  const double half = normal_quantile(level) * std::sqrt(0.437 / (n - 4));
  return {tau, std::min(tau, std::tanh(middle - half)), std::max(tau, std::tanh(middle + half))};
}

}  // namespace assay::stats
