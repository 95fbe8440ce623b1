#include "stats/interpolation.h"

#include <algorithm>
#include <numeric>

namespace assay::stats {
namespace {

std::vector<double> scaled(std::vector<double> x, double factor) {
  for (double& value : x) value *= factor;
  return x;
}

std::vector<double> difference_quotient(const std::vector<double>& high,
                                        const std::vector<double>& low, double step) {
  std::vector<double> quotient(high.size());
  for (size_t b = 0; b < high.size(); ++b) quotient[b] = (high[b] - low[b]) / (2 * step);
  return quotient;
}

}  // namespace

double weighted_sum(const std::vector<double>& weights, const std::vector<double>& values) {
  return std::inner_product(weights.begin(), weights.end(), values.begin(), 0.0);
}

void add(std::vector<double>& sum, const std::vector<double>& x, double factor) {
  sum.resize(x.size());
  for (size_t i = 0; i < x.size(); ++i) sum[i] += factor * x[i];
}

RungCurve::RungCurve(std::vector<double> held_out, const std::vector<double>& loss)
    : held_out_(std::move(held_out)), slopes_(held_out_.size(), Slope::parabola) {
  const size_t last = held_out_.size() - 1;
  for (size_t b = 0; b <= last; ++b) {
    const double slope = weighted_sum(parabola_weights(held_out_, b), loss);
    const auto secant = [&](size_t k) { return weighted_sum(secant_weights(held_out_, k), loss); };
    const double before = b > 0 ? secant(b - 1) : secant(0);
    const double after = b < last ? secant(b) : secant(last - 1);
    if (slope <= 0 || before <= 0 || after <= 0) slopes_[b] = Slope::zero;
    else if (slope > 3 * std::min(before, after))
      slopes_[b] = before < after ? Slope::three_times_before : Slope::three_times_after;
  }
  if (last == 1) std::ranges::fill(slopes_, Slope::parabola);
}

size_t RungCurve::segment(const std::vector<double>& rungs, double held_out) {
  size_t b = 0;
  while (b + 2 < rungs.size() && held_out < rungs[b + 1]) ++b;
  return b;
}

std::vector<double> RungCurve::secant_weights(const std::vector<double>& rungs,
                                              size_t segment) const {
  std::vector<double> weights(rungs.size());
  const double width = rungs[segment + 1] - rungs[segment];
  weights[segment] = -1 / width;
  weights[segment + 1] = 1 / width;
  return weights;
}

// The slope at a rung of the parabola through three rungs; with two rungs, of the line.
std::vector<double> RungCurve::parabola_weights(const std::vector<double>& rungs,
                                                size_t rung) const {
  const size_t last = rungs.size() - 1;
  if (last == 1) return secant_weights(rungs, 0);
  const size_t middle = std::clamp<size_t>(rung, 1, last - 1);
  const double before = rungs[middle] - rungs[middle - 1];
  const double after = rungs[middle + 1] - rungs[middle];
  // Newton's form: secant of the nearer segment plus its change times the distance.
  double share_of_after = before / (before + after);
  if (rung == 0) share_of_after = -before / (before + after);
  if (rung == last) share_of_after = 1 + after / (before + after);
  auto weights = scaled(secant_weights(rungs, middle - 1), 1 - share_of_after);
  add(weights, secant_weights(rungs, middle), share_of_after);
  return weights;
}

std::vector<double> RungCurve::slope_weights(const std::vector<double>& rungs, size_t rung) const {
  const size_t last = rungs.size() - 1;
  switch (slopes_[rung]) {
    case Slope::zero:
      return std::vector<double>(rungs.size());
    case Slope::three_times_before:
      return scaled(secant_weights(rungs, rung > 0 ? rung - 1 : 0), 3);
    case Slope::three_times_after:
      return scaled(secant_weights(rungs, std::min(rung, last - 1)), 3);
    case Slope::parabola:
      break;
  }
  return parabola_weights(rungs, rung);
}

std::vector<double> RungCurve::weights(const std::vector<double>& rungs, double held_out) const {
  const size_t last = rungs.size() - 1;
  std::vector<double> weights(rungs.size());
  for (const size_t end : {size_t{0}, last}) {
    const bool beyond = end == 0 ? held_out > rungs[0] : held_out < rungs[last];
    if (!beyond) continue;
    weights[end] = 1;
    add(weights, slope_weights(rungs, end), held_out - rungs[end]);
    return weights;
  }
  const size_t b = segment(rungs, held_out);
  const double width = rungs[b + 1] - rungs[b];
  const double x = (held_out - rungs[b]) / width;
  weights[b] = (1 + 2 * x) * (1 - x) * (1 - x);
  weights[b + 1] = x * x * (3 - 2 * x);
  add(weights, slope_weights(rungs, b), x * (1 - x) * (1 - x) * width);
  add(weights, slope_weights(rungs, b + 1), x * x * (x - 1) * width);
  return weights;
}

double RungCurve::at(double held_out, const std::vector<double>& values) const {
  return weighted_sum(weights(held_out), values);
}

std::vector<std::vector<double>> RungCurve::by_rung(
    const std::function<std::vector<double>(const std::vector<double>&)>& weights) const {
  std::vector<std::vector<double>> derivatives;
  for (size_t b = 0; b < held_out_.size(); ++b) {
    auto high = held_out_;
    auto low = held_out_;
    high[b] += step();
    low[b] -= step();
    derivatives.push_back(difference_quotient(weights(high), weights(low), step()));
  }
  return derivatives;
}

RungCurve::Reading RungCurve::read(double held_out) const {
  return {weights(held_out),
          difference_quotient(weights(held_out + step()), weights(held_out - step()), step()),
          by_rung([&](const std::vector<double>& rungs) { return weights(rungs, held_out); })};
}

RungCurve::RungSlope RungCurve::rung_slope(size_t rung, bool before, bool after) const {
  const auto slope = [&](const std::vector<double>& rungs) {
    if (before && after) return parabola_weights(rungs, rung);
    return secant_weights(rungs, after ? rung : rung - 1);
  };
  return {slope(held_out_), by_rung(slope)};
}

}  // namespace assay::stats
