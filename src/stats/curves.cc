#include "stats/curves.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <utility>

#include "base/error.h"

namespace assay::stats {
namespace {

Stretch merged(const Stretch& a, const Stretch& b) {
  const double n = double(a.count);
  const double m = double(b.count);
  return {(n * a.loss + m * b.loss) / (n + m), (n * a.log_tokens + m * b.log_tokens) / (n + m),
          a.first, a.count + b.count};
}

size_t stretches_inside(std::span<const Curve> curves, Range range) {
  size_t inside = 0;
  for (const Curve& curve : curves)
    for (const Stretch& s : curve) inside += range.low <= s.loss && s.loss <= range.high;
  return inside;
}

double widest(std::span<const Curve> curves) {
  double width = 0;
  for (const Curve& curve : curves) width = std::max(width, curve.front().loss - curve.back().loss);
  return width;
}

}  // namespace

Curve curve_of(const Run& run, double after_tokens) {
  Curve curve;
  double last = -1;
  for (size_t k = 0; k < run.curve.size(); ++k) {
    const Point& point = run.curve[k];
    if (!(point.tokens_seen > last))
      fail("the evaluations of seed {} are not in order: {} tokens follow {}", run.seed,
           point.tokens_seen, last);
    last = point.tokens_seen;
    if (!(point.tokens_seen > after_tokens)) continue;
    curve.push_back({point.pretraining_loss, std::log(point.tokens_seen), k, 1});
    while (curve.size() > 1 && !(curve.back().loss < curve[curve.size() - 2].loss)) {
      const Stretch end = curve.back();
      curve.pop_back();
      curve.back() = merged(curve.back(), end);
    }
  }
  return curve;
}

Range shared_range(std::span<const Curve> curves) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  Range range{-infinity, infinity};
  for (const Curve& curve : curves)
    range = {std::max(range.low, curve.back().loss), std::min(range.high, curve.front().loss)};
  return range;
}

std::string range_problem(std::span<const Curve> architecture, std::span<const Curve> reference) {
  std::vector<Curve> all(architecture.begin(), architecture.end());
  all.insert(all.end(), reference.begin(), reference.end());
  const Range range = shared_range(all);
  const Range one = shared_range(architecture);
  const Range other = shared_range(reference);
  const auto spans = fmt::format(
      "every run of the architecture covers {:.3f} to {:.3f}, of the reference {:.3f} to {:.3f}",
      one.high, one.low, other.high, other.low);
  if (!(range.width() > 0)) return "the curves share no range of pre-training loss: " + spans;
  if (range.width() < 0.1 * widest(all))
    return fmt::format(
        "the curves share only {:.3f} to {:.3f} of pre-training loss, "
        "less than a tenth of the longest: {}",
        range.high, range.low, spans);
  for (const auto& [name, curves] :
       {std::pair{"architecture", architecture}, {"reference", reference}})
    if (stretches_inside(curves, range) < 2)
      return fmt::format(
          "the {} has fewer than two evaluations in the shared range of pre-training loss, "
          "{:.3f} to {:.3f}",
          name, range.high, range.low);
  return "";
}

std::vector<double> mean_weights(const Curve& curve, size_t evaluations, Range range) {
  std::vector<double> weights(evaluations);
  const auto add = [&](const Stretch& stretch, double weight) {
    for (size_t k = 0; k < stretch.count; ++k)
      weights[stretch.first + k] += weight / double(stretch.count);
  };
  for (size_t j = 0; j + 1 < curve.size(); ++j) {
    const double top = curve[j].loss;
    const double bottom = curve[j + 1].loss;
    const double high = std::min(top, range.high);
    const double low = std::max(bottom, range.low);
    if (high <= low) continue;
    const double share = (high - low) / range.width();
    const double upper = ((high + low) / 2 - bottom) / (top - bottom);
    add(curve[j], share * upper);
    add(curve[j + 1], share * (1 - upper));
  }
  return weights;
}

double log_tokens_at(const Curve& curve, double loss) {
  const auto below = std::ranges::find_if(curve, [&](const Stretch& s) { return s.loss <= loss; });
  if (below == curve.begin() || below == curve.end())
    return below == curve.end() ? curve.back().log_tokens : below->log_tokens;
  const Stretch& a = *(below - 1);
  const Stretch& b = *below;
  return b.log_tokens + (a.log_tokens - b.log_tokens) * (loss - b.loss) / (a.loss - b.loss);
}

}  // namespace assay::stats
