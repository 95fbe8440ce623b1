#include "stats/items.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "stats/student.h"

namespace assay::stats {

double normal_quantile(double level) {
  double low = 0;
  double high = 40;
  for (int i = 0; i < 200; ++i) {
    const double middle = (low + high) / 2;
    (std::erf(middle / std::sqrt(2.0)) < level ? low : high) = middle;
  }
  return (low + high) / 2;
}

Interval wilson_interval(double p, double n, double z) {
  const double shrink = 1 + z * z / n;
  const double centre = (p + z * z / (2 * n)) / shrink;
  const double half = z * std::sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / shrink;
  // At 0 and 1 rounding would leave a bound that is almost, but not exactly, p
  return {p, p > 0 ? std::max(0.0, centre - half) : 0, p < 1 ? std::min(1.0, centre + half) : 1};
}

Interval share_interval(double successes, double n, double level) {
  if (n <= 0) return {std::numeric_limits<double>::quiet_NaN(), 0, 1};
  return wilson_interval(successes / n, n, normal_quantile(level));
}

double standard_error(std::span<const double> values) {
  const auto n = double(values.size());
  if (n < 2) return 0;
  return std::sqrt(seed_variance(ByRun{{values.begin(), values.end()}}).value / n);
}

Interval mean_interval(std::span<const double> values, double level) {
  if (values.size() < 2) {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    return {values.empty() ? std::numeric_limits<double>::quiet_NaN() : values[0], -infinity,
            infinity};
  }
  const double centre = mean(values);
  const double half = student_quantile(level, double(values.size()) - 1) * standard_error(values);
  return {centre, centre - half, centre + half};
}

Interval paired_share_difference(std::span<const double> a, std::span<const double> b,
                                 double level) {
  double first = 0;
  double second = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    first += a[i] > b[i];
    second += b[i] > a[i];
  }
  const auto n = double(a.size());
  const double p = (first + 1) / (n + 2);
  const double q = (second + 1) / (n + 2);
  const double half = normal_quantile(level) * std::sqrt((p + q - (p - q) * (p - q)) / (n + 2));
  return {n > 0 ? (first - second) / n : 0, std::max(-1.0, p - q - half),
          std::min(1.0, p - q + half)};
}

}  // namespace assay::stats
