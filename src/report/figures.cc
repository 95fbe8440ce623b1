#include "report/figures.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace assay::report {
namespace {

constexpr std::array kColours = {"#222222", "#0072B2", "#D55E00", "#009E73", "#CC79A7",
                                 "#B8860B", "#3A9BDC", "#7A5195", "#7F7F7F"};
constexpr std::array kShapes = {Shape::circle,      Shape::square, Shape::diamond,
                                Shape::triangle_up, Shape::cross,  Shape::triangle_down,
                                Shape::star,        Shape::saltire};

}  // namespace

int palette(int style) { return style == 0 ? 0 : 1 + (style - 1) % int(kColours.size() - 1); }
const char* colour(int style) { return kColours[size_t(palette(style))]; }
Shape shape(int style) {
  return kShapes[style == 0 ? 0 : 1 + size_t(style - 1) % (kShapes.size() - 1)];
}

std::pair<double, double> shown_range(const Figure& figure, bool vertical) {
  const Axis& axis = vertical ? figure.y : figure.x;
  if (axis.range) return *axis.range;
  double low = INFINITY;
  double high = -INFINITY;
  const auto see = [&](double value) {
    if (!std::isfinite(value) || (axis.log && value <= 0)) return;
    low = std::min(low, value);
    high = std::max(high, value);
  };
  for (const auto& [value, text] : axis.ticks) see(value);
  for (const Series& series : figure.series) {
    for (const double value : vertical ? series.y : series.x) see(value);
    if (vertical != series.upright) continue;
    for (const auto* ends : {&series.low, &series.high})
      for (const double value : *ends) see(value);
  }
  if (const auto& line = vertical ? figure.horizontal : figure.vertical) {
    see(*line - figure.band);
    see(*line + figure.band);
  }
  if (low > high) {
    low = axis.log ? 1 : 0;
    high = axis.log ? 10 : 1;
  }
  if (axis.log) {
    const double margin = std::pow(high / low + 0.1, 0.04);
    return {low / margin, high * margin};
  }
  const double missing = std::max(0.0, axis.least - (high - low)) / 2;
  low -= missing;
  high += missing;
  const double margin = high > low ? 0.05 * (high - low) : 0.5;
  return {low - margin, high + margin};
}

}  // namespace assay::report
