#include "tasks/metrics.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "stats/items.h"
#include "stats/student.h"

namespace assay::tasks {
namespace {

constexpr double kLevel = 0.95;

double value_of(const Item& item, const std::string& metric) {
  return item.scores["metrics"].value(metric, 0.0);
}
double weight_of(const Item& item, const std::string& metric) {
  return item.scores.contains("weights") ? item.scores["weights"].value(metric, 1.0) : 1.0;
}

bool is_weighted(const std::string& metric) {
  return metric == "word_perplexity" || metric == "byte_perplexity" || metric == "bits_per_byte";
}

bool is_share(const std::vector<double>& values) {
  return std::ranges::all_of(values, [](double value) { return value == 0 || value == 1; });
}

// −(mean log-likelihood) on the scale of the metric; it turns the interval around.
stats::Interval transformed(const stats::Interval& of_logprob, const std::string& metric) {
  const auto scale = [&](double logprob) {
    return metric == "bits_per_byte" ? -logprob / std::log(2.0) : std::exp(-logprob);
  };
  return {scale(of_logprob.estimate), scale(of_logprob.high), scale(of_logprob.low)};
}

stats::Interval ratio_interval(const std::vector<double>& values,
                               const std::vector<double>& weights) {
  const double estimate = stats::ratio(values, weights);
  const stats::Variance variance = stats::document_variance(values, weights);
  const double half = variance.freedom > 0 ? stats::student_quantile(kLevel, variance.freedom) *
                                                 std::sqrt(variance.value)
                                           : INFINITY;
  return {estimate, estimate - half, estimate + half};
}

}  // namespace

Summary summarize(const std::vector<Item>& items, const std::string& metric) {
  Summary out{.items = int64_t(items.size())};
  std::vector<double> values;
  std::vector<double> weights;
  for (const Item& item : items) {
    values.push_back(value_of(item, metric));
    weights.push_back(weight_of(item, metric));
  }
  if (items.empty()) return {NAN, {NAN, NAN, NAN}, 0, 0};
  if (is_weighted(metric)) {
    out.interval = transformed(ratio_interval(values, weights), metric);
  } else if (metric == "perplexity") {
    out.interval = transformed(stats::mean_interval(values, kLevel), metric);
  } else {
    out.standard_error = stats::standard_error(values);
    out.interval = is_share(values)
                       ? stats::share_interval(stats::mean(values) * double(values.size()),
                                               double(values.size()), kLevel)
                       : stats::mean_interval(values, kLevel);
  }
  out.value = out.interval.estimate;
  return out;
}

stats::Interval difference(const std::vector<Item>& a, const std::vector<Item>& b,
                           const std::string& metric) {
  std::map<size_t, const Item*> second;
  for (const Item& item : b) second[item.index] = &item;
  std::vector<double> first_values;
  std::vector<double> second_values;
  std::vector<double> differences;
  double weights = 0;
  for (const Item& item : a) {
    const auto found = second.find(item.index);
    if (found == second.end()) continue;
    first_values.push_back(value_of(item, metric));
    second_values.push_back(value_of(*found->second, metric));
    differences.push_back(first_values.back() - second_values.back());
    weights += weight_of(item, metric);
  }
  if (is_weighted(metric) || metric == "perplexity") {
    const double scale =
        -double(differences.size()) / weights / (metric == "bits_per_byte" ? std::log(2.0) : 1);
    const stats::Interval mean = stats::mean_interval(differences, kLevel);
    return {mean.estimate * scale, mean.high * scale, mean.low * scale};
  }
  if (is_share(first_values) && is_share(second_values))
    return stats::paired_share_difference(first_values, second_values, kLevel);
  return stats::mean_interval(differences, kLevel);
}

}  // namespace assay::tasks
