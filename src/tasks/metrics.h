#pragma once
// Numbers of a task from the scores of its items.
//   acc, acc_norm, acc_bytes, contains, exact_match, …   mean over items
//   perplexity                                           exp(−mean of the items' log-likelihoods)
//   word_perplexity, byte_perplexity                     exp(−Σ log-likelihood / Σ weight)
//   bits_per_byte                                        −Σ log-likelihood / Σ weight / ln 2
#include <string>
#include <vector>

#include "stats/uncertainty.h"
#include "tasks/results.h"

namespace assay::tasks {

struct Summary {
  double value = 0;
  stats::Interval interval;   // 95 %, on the scale of the value
  double standard_error = 0;  // s/√n of means, s with n − 1; 0 for the others
  int64_t items = 0;
};
Summary summarize(const std::vector<Item>& items, const std::string& metric);

// Difference of the metric: a − b over the items that both answered. For perplexities, it is the
// difference of their logarithms.
stats::Interval difference(const std::vector<Item>& a, const std::vector<Item>& b,
                           const std::string& metric);

}  // namespace assay::tasks
