#pragma once
// A figure as data, drawn twice: by Plotly in the page, and as an SVG file for a paper.
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace assay::report {

struct Series {
  std::string name;
  int style = 0;                  // 0: the reference (black circles), then one colour and symbol each
  std::vector<double> x, y;       // points that are not finite are left out
  std::vector<double> low, high;  // ends of an error bar; empty for none
  bool line = true;
  double marker = 3;     // radius in pixels; the last point of a line is drawn larger
  bool upright = false;  // the error bar stands along y, not x
};

struct Axis {
  std::string title;
  bool log = false;
  std::optional<std::pair<double, double>> range;     // (from, to), from > to turns it over; none: what the data span
  std::vector<std::pair<double, std::string>> ticks;  // empty: round numbers
  double least = 0;  // shows at least this span, so that noise does not fill the figure
};

struct Figure {
  std::string id, title;  // id: the name of the SVG file
  Axis x, y;
  std::vector<Series> series = {};
  bool identity = false;                  // the line y = x
  std::optional<double> vertical = {};    // a line at this x
  std::optional<double> horizontal = {};  // a line at this y
  int height = 340;                       // pixels
};

const char* colour(int style);  // Okabe and Ito's palette, told apart by colour-blind readers too
const char* plotly_symbol(int style);

// {"data": […], "layout": {…}} for Plotly.newPlot, without a legend: the page has one for all.
nlohmann::json to_plotly(const Figure& figure);

// The range that the axis shows: its own, else the data's with a margin.
std::pair<double, double> shown_range(const Figure& figure, bool vertical);

}  // namespace assay::report
