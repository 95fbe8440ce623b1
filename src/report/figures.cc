#include "report/figures.h"

#include <array>
#include <cmath>

namespace assay::report {
namespace {

using Json = nlohmann::json;

constexpr std::array kColours = {"#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7",
                                 "#E69F00", "#56B4E9", "#7A5195", "#8C8C8C"};
constexpr std::array kSymbols = {"circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "star", "x"};

Json numbers(const std::vector<double>& values) {
  Json out = Json::array();
  for (const double value : values) out.push_back(std::isfinite(value) ? Json(value) : Json());
  return out;
}

Json marker_sizes(const Series& series) {
  Json sizes = Json::array();
  for (size_t i = 0; i < series.x.size(); ++i)
    sizes.push_back(2 * (series.line && i + 1 == series.x.size() ? std::max(series.marker, 4.5) : series.marker));
  return sizes;
}

Json trace(const Series& series) {
  Json out = {
      {"type", "scatter"},
      {"mode", series.line ? series.marker > 0 ? "lines+markers" : "lines" : "markers"},
      {"name", series.name},
      {"x", numbers(series.x)},
      {"y", numbers(series.y)},
      {"line", {{"color", colour(series.style)}, {"width", 1.5}}},
      {"marker",
       {{"color", colour(series.style)}, {"symbol", plotly_symbol(series.style)}, {"size", marker_sizes(series)}}},
      {"hovertemplate", "%{x:.4g}, %{y:.4g}<extra>" + series.name + "</extra>"}};
  if (series.low.empty()) return out;
  const std::vector<double>& along = series.upright ? series.y : series.x;
  Json plus = Json::array(), minus = Json::array();
  for (size_t i = 0; i < along.size(); ++i)
    plus.push_back(series.high[i] - along[i]), minus.push_back(along[i] - series.low[i]);
  out[series.upright ? "error_y" : "error_x"] = {{"type", "data"},      {"symmetric", false}, {"array", plus},
                                                 {"arrayminus", minus}, {"thickness", 1.8},   {"width", 4}};
  out["hovertemplate"] = (series.upright ? "%{y:.3f}<extra>" : "%{x:.3f}<extra>") + series.name + "</extra>";
  return out;
}

Json axis(const Figure& figure, bool vertical) {
  const Axis& axis = vertical ? figure.y : figure.x;
  auto [low, high] = shown_range(figure, vertical);
  if (axis.log) low = std::log10(low), high = std::log10(high);
  Json out = {{"title", {{"text", axis.title}, {"standoff", 8}, {"font", {{"size", 13}}}}},
              {"range", {low, high}},
              {"automargin", true},
              {"zeroline", false},
              {"gridcolor", "#e5e5e5"},
              {"linecolor", "#444444"},
              {"ticks", "outside"},
              {"tickcolor", "#444444"},
              {"nticks", 7}};
  if (axis.log) out["type"] = "log", out["dtick"] = 1;
  if (!axis.ticks.empty()) {
    out["tickmode"] = "array";
    for (const auto& [at, text] : axis.ticks) out["tickvals"].push_back(at), out["ticktext"].push_back(text);
  }
  return out;
}

Json dashed(double x0, double y0, double x1, double y1) {
  return {{"type", "line"},
          {"x0", x0},
          {"y0", y0},
          {"x1", x1},
          {"y1", y1},
          {"layer", "below"},
          {"line", {{"color", "#777777"}, {"width", 1.2}, {"dash", "dash"}}}};
}

}  // namespace

const char* colour(int style) { return kColours[size_t(style) % kColours.size()]; }
const char* plotly_symbol(int style) { return kSymbols[size_t(style) % kSymbols.size()]; }

std::pair<double, double> shown_range(const Figure& figure, bool vertical) {
  const Axis& axis = vertical ? figure.y : figure.x;
  if (axis.range) return *axis.range;
  double low = INFINITY, high = -INFINITY;
  const auto see = [&](double value) {
    if (std::isfinite(value) && (!axis.log || value > 0)) low = std::min(low, value), high = std::max(high, value);
  };
  for (const Series& series : figure.series) {
    for (const double value : vertical ? series.y : series.x) see(value);
    if (vertical == series.upright)
      for (const auto* ends : {&series.low, &series.high})
        for (const double value : *ends) see(value);
  }
  if (const auto& line = vertical ? figure.horizontal : figure.vertical) see(*line);
  if (low > high) low = axis.log ? 1 : 0, high = axis.log ? 10 : 1;
  if (axis.log) return {low / std::pow(high / low + 0.1, 0.04), high * std::pow(high / low + 0.1, 0.04)};
  const double missing = std::max(0.0, axis.least - (high - low)) / 2;
  low -= missing, high += missing;
  const double margin = high > low ? 0.05 * (high - low) : 0.5;
  return {low - margin, high + margin};
}

Json to_plotly(const Figure& figure) {
  Json data = Json::array(), shapes = Json::array();
  for (const Series& series : figure.series) data.push_back(trace(series));
  if (figure.identity) {
    const auto [low, high] = shown_range(figure, false);
    const auto [bottom, top] = shown_range(figure, true);
    shapes.push_back(dashed(std::min(low, bottom), std::min(low, bottom), std::max(high, top), std::max(high, top)));
  }
  if (figure.vertical) {
    shapes.push_back(dashed(*figure.vertical, 0, *figure.vertical, 1));
    shapes.back()["yref"] = "paper";
    shapes.back()["line"] = {{"color", "#222222"}, {"width", 1.2}};
  }
  if (figure.horizontal) {
    shapes.push_back(dashed(0, *figure.horizontal, 1, *figure.horizontal));
    shapes.back()["xref"] = "paper";
    shapes.back()["line"] = {{"color", "#222222"}, {"width", 1.2}};
  }
  return {{"data", data},
          {"layout",
           {{"title",
             {{"text", "<b>" + figure.title + "</b>"}, {"x", 0.02}, {"xanchor", "left"}, {"font", {{"size", 15}}}}},
            {"height", figure.height},
            {"autosize", true},
            {"showlegend", false},
            {"hovermode", "closest"},
            {"shapes", shapes},
            {"font", {{"family", "system-ui, sans-serif"}, {"size", 13}, {"color", "#222222"}}},
            {"margin", {{"l", 52}, {"r", 12}, {"t", 40}, {"b", 46}}},
            {"paper_bgcolor", "#ffffff"},
            {"plot_bgcolor", "#ffffff"},
            {"xaxis", axis(figure, false)},
            {"yaxis", axis(figure, true)}}}};
}

}  // namespace assay::report
