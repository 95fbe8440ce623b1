#pragma once
// Means over items (questions of a task), and differences of two models on the same items.
#include <span>

#include "stats/uncertainty.h"

namespace assay::stats {

double normal_quantile(double level);  // the z for which P(|Z| ≤ z) = level: 1.95996 for 0.95

// A share of `successes` in n independent items: Wilson's score interval [Wilson 1927]. Never
// empty, also for 0 and n.
//   (p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n)
Interval share_interval(double successes, double n, double level);
// Wilson's interval for a share p of n items. n need not be a whole number, and z is any quantile.
Interval wilson_interval(double p, double n, double z);

// The mean of values that differ from item to item: mean ± t √(s²/n), s² with n − 1. Infinite for
// n < 2.
Interval mean_interval(std::span<const double> values, double level);
double standard_error(std::span<const double> values);  // √(s²/n); 0 for n < 2

// share(a) − share(b), where a[i] and b[i] are 0 or 1 for the same item. The estimate is the
// plain difference; the interval is that of Bonett and Price (2012), with one item added to each
// kind of disagreement:
//   d̃ ± z √((p̃₁₀ + p̃₀₁ − d̃²) / (n + 2)),  p̃₁₀ = (#(a=1, b=0) + 1) / (n + 2),  p̃₀₁ likewise,
//       d̃ = p̃₁₀ − p̃₀₁
Interval paired_share_difference(std::span<const double> a, std::span<const double> b,
                                 double level);

}  // namespace assay::stats
