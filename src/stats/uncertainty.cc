#include "stats/uncertainty.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "stats/student.h"

namespace assay::stats {
namespace {

double total(std::span<const double> x) { return std::accumulate(x.begin(), x.end(), 0.0); }

}  // namespace

double mean(std::span<const double> x) { return total(x) / double(x.size()); }

Variance seed_variance(const ByRun& runs) {
  Variance variance;
  for (const auto& seeds : runs) {
    const double centre = mean(seeds);
    for (const double x : seeds) variance.value += (x - centre) * (x - centre);
    variance.freedom += double(seeds.size()) - 1;
  }
  if (variance.freedom > 0) variance.value /= variance.freedom;
  return variance;
}

Variance seed_variance_of_difference(const ByRun& runs) {
  const Variance one = seed_variance(runs);
  return {one.value * (1.0 / double(runs[0].size()) + 1.0 / double(runs[1].size())), one.freedom};
}

double ratio(std::span<const double> y, std::span<const double> tokens) {
  return total(y) / total(tokens);
}

std::vector<double> document_influence(std::span<const double> y, std::span<const double> tokens) {
  const double all = total(tokens);
  const double centre = total(y) / all;
  double concentration = 0;
  for (const double t : tokens) concentration += t / all * (t / all);
  std::vector<double> influence(y.size());
  for (size_t i = 0; i < y.size(); ++i) {
    const double scale = 1 - 2 * tokens[i] / all + concentration;
    if (tokens[i] > 0 && scale > 1e-12)
      influence[i] = (y[i] - centre * tokens[i]) / all / std::sqrt(scale);
  }
  return influence;
}

Variance document_variance(std::span<const double> y, std::span<const double> tokens) {
  const double all = total(tokens);
  double concentration = 0;
  for (const double t : tokens) concentration += t / all * (t / all);
  Variance variance{0, std::max(1.0, 1 / concentration - 1)};
  for (const double u : document_influence(y, tokens)) variance.value += u * u;
  return variance;
}

Variance sum(std::span<const Variance> parts) {
  double value = 0;
  double square = 0;
  for (const Variance& part : parts) {
    value += part.value;
    square += part.value * part.value / part.freedom;
  }
  return {value, square > 0 ? value * value / square : 1};
}

Interval interval(double estimate, Variance seeds, Variance documents, double level) {
  const double variance = seeds.value + documents.value;
  if (!(variance > 0)) return {estimate, estimate, estimate};
  const double of_seeds = seeds.value / variance;
  const double of_documents = documents.value / variance;
  const double freedom =
      1 / ((of_seeds > 0 ? of_seeds / seeds.freedom : 0) +
           (of_documents > 0 ? of_documents * of_documents / documents.freedom : 0));
  const double reach = student_quantile(level, freedom) * std::sqrt(variance);
  return {estimate, estimate - reach, estimate + reach};
}

}  // namespace assay::stats
