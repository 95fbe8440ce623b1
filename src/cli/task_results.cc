#include "cli/task_results.h"

#include <algorithm>

namespace assay::cli {
namespace {

run::TaskMetric metric_of(const std::string& name, const std::vector<tasks::Item>& items) {
  std::vector<double> values;
  std::vector<double> weights;
  for (const tasks::Item& item : items) {
    values.push_back(item.scores["metrics"].value(name, 0.0));
    weights.push_back(item.scores.contains("weights") ? item.scores["weights"].value(name, 1.0)
                                                      : 1.0);
  }
  if (!run::is_likelihood(name)) return {.name = name, .bits = run::bits_of(values)};
  return {.name = name, .sums = run::block_sums(values), .weights = run::block_sums(weights)};
}

}  // namespace

run::TaskResult result_of(const tasks::Task& task, const std::string& key,
                          const std::vector<tasks::Item>& items) {
  run::TaskResult result{.name = task.name, .key = key, .items = int64_t(items.size())};
  result.truncated =
      std::ranges::count_if(items, [](const tasks::Item& item) { return item.dropped > 0; });
  for (const std::string& name : task.metrics) result.metrics.push_back(metric_of(name, items));
  return result;
}

void put_result(std::vector<run::TaskResult>& results, run::TaskResult result) {
  const auto earlier = std::ranges::find(results, result.name, &run::TaskResult::name);
  if (earlier == results.end()) results.push_back(std::move(result));
  else *earlier = std::move(result);
}

}  // namespace assay::cli
