#pragma once
// A figure as data. svg.h draws it.
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace assay::report {

struct Series {
  std::string name;
  // 0: the reference (black circles), then one colour and symbol each
  int style = 0;
  // points that are not finite are left out
  std::vector<double> x;
  std::vector<double> y;
  // ends of an error bar; empty for none
  std::vector<double> low;
  std::vector<double> high;
  bool line = true;
  double marker = 3;                   // radius in pixels; the last point of a line is drawn larger
  bool upright = false;                // the error bar runs along y, not x
  bool hollow = false;                 // symbols are drawn as outlines
  std::vector<std::string> tips = {};  // tooltip of each point; empty: the name and both values
};

struct Axis {
  std::string title;
  bool log = false;
  std::optional<std::pair<double, double>> range;     // (from, to); from > to reverses the axis
  std::vector<std::pair<double, std::string>> ticks;  // empty: round numbers
  double least = 0;  // the axis shows at least this span, so that noise does not fill the figure
};

struct Figure {
  // id: the name of the SVG file
  std::string id;
  std::string title;
  Axis x;
  Axis y;
  std::vector<Series> series = {};
  bool identity = false;                  // the line y = x
  std::optional<double> vertical = {};    // a line at this x
  std::optional<double> horizontal = {};  // a line at this y
  double band = 0;  // half-width of the margin band around `vertical` or `horizontal`
  // of the drawing without its legend, in pixels
  int width = 480;
  int height = 340;
};

// Index of a style's colour, from 0 to 8. No other style has the colour or the shape of style 0;
// styles 1 to 56 differ from each other in at least one of the two.
int palette(int style);
// Palette of Okabe and Ito, which colour-blind readers can tell apart
const char* colour(int style);
enum class Shape { circle, square, diamond, triangle_up, cross, triangle_down, star, saltire };
Shape shape(int style);

// The range that the axis shows: its own, else that of the data and ticks with a margin.
std::pair<double, double> shown_range(const Figure& figure, bool vertical);

}  // namespace assay::report
