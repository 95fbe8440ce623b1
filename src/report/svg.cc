#include "report/svg.h"

#include <fmt/format.h>

#include <cmath>
#include <set>

namespace assay::report {
namespace {

constexpr double kWidth = 640, kRight = 18, kTop = 40, kBottom = 52, kLegendLine = 20;
constexpr int kLegendColumns = 3;

using Ticks = std::vector<std::pair<double, std::string>>;

std::string tick_text(double value, int digits) {
  if (std::abs(value) >= 1e9) return fmt::format("{:g}G", value / 1e9);
  if (std::abs(value) >= 1e6) return fmt::format("{:g}M", value / 1e6);
  if (std::abs(value) >= 1e4) return fmt::format("{:g}k", value / 1e3);
  return fmt::format("{:.{}f}", value + 0.0, digits);
}

// Room for the longest label, about 7 pixels a letter.
double left_margin(const Figure& figure) {
  size_t longest = 0;
  for (const auto& [at, text] : figure.y.ticks) longest = std::max(longest, text.size());
  return std::max(74.0, 20 + 7.0 * double(longest));
}

Ticks round_ticks(double low, double high) {
  const double rough = (high - low) / 6, power = std::pow(10, std::floor(std::log10(rough))), ratio = rough / power;
  const double step = power * (ratio <= 1 ? 1 : ratio <= 2 ? 2 : ratio <= 5 ? 5 : 10);
  const int digits = std::max(0, int(-std::floor(std::log10(step) + 1e-9)));
  Ticks out;
  for (double k = std::ceil(low / step); k * step <= high * (1 + 1e-12); ++k)
    out.emplace_back(k * step, tick_text(k * step, digits));
  return out;
}

Ticks decade_ticks(double low, double high) {
  Ticks out;
  const bool few = std::log10(high / low) < 2.5;
  for (double decade = std::pow(10, std::floor(std::log10(low))); decade <= high; decade *= 10)
    for (const double factor : {1, 2, 5})
      if (decade * factor >= low && decade * factor <= high && (few || factor == 1))
        out.emplace_back(decade * factor,
                         decade < 1e4 ? fmt::format("{:g}", decade * factor) : tick_text(decade * factor, 0));
  return out;
}

// Where a value stands on the paper.
class Scale {
 public:
  Scale(const Figure& figure, bool vertical, double from, double to)
      : axis_(vertical ? figure.y : figure.x), range_(shown_range(figure, vertical)), from_(from), to_(to) {}
  double operator()(double value) const {
    const double a = map(range_.first), b = map(range_.second);
    return from_ + (map(value) - a) / (b - a) * (to_ - from_);
  }
  bool inside(double value) const {
    const auto [low, high] = std::minmax(range_.first, range_.second);
    return std::isfinite(value) && value >= low && value <= high;
  }
  Ticks ticks() const {
    if (!axis_.ticks.empty()) return axis_.ticks;
    const auto [low, high] = std::minmax(range_.first, range_.second);
    return axis_.log ? decade_ticks(low, high) : round_ticks(low, high);
  }
  std::pair<double, double> range() const { return range_; }

 private:
  double map(double value) const { return axis_.log ? std::log10(value) : value; }
  const Axis& axis_;
  std::pair<double, double> range_;
  double from_, to_;
};

class Drawing {
 public:
  explicit Drawing(const Figure& figure)
      : figure_(figure),
        left_(left_margin(figure)),
        bottom_(std::max(380.0, double(figure.height) + 40) - kBottom),
        x_(figure, false, left_, kWidth - kRight),
        y_(figure, true, bottom_, kTop) {}

  std::string text() {
    axes();
    body_ += fmt::format("<g clip-path=\"url(#plot)\">\n");
    guides();
    for (const Series& series : figure_.series) draw(series);
    body_ += "</g>\n";
    const double height = legend();
    return fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" "
        "font-family=\"Helvetica, Arial, "
        "sans-serif\" font-size=\"13\" fill=\"#222\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
        "<clipPath id=\"plot\"><rect x=\"{2}\" y=\"{3}\" width=\"{4}\" height=\"{5}\"/></clipPath>\n{6}</svg>\n",
        kWidth, height, left_, kTop, kWidth - kRight - left_, bottom_ - kTop, body_);
  }

 private:
  void line(double x1, double y1, double x2, double y2, const char* colour, double width, const char* more = "") {
    body_ += fmt::format(
        "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" stroke-width=\"{}\" {}/>\n", x1,
        y1, x2, y2, colour, width, more);
  }
  void label(double x, double y, const char* anchor, const std::string& text, const char* more = "") {
    body_ += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" {}>{}</text>\n", x, y, anchor, more,
                         escape(text));
  }

  void axes() {
    for (const auto& [value, text] : x_.ticks()) {
      line(x_(value), kTop, x_(value), bottom_, "#e5e5e5", 1);
      label(x_(value), bottom_ + 18, "middle", text);
    }
    for (const auto& [value, text] : y_.ticks()) {
      line(left_, y_(value), kWidth - kRight, y_(value), "#e5e5e5", 1);
      label(left_ - 8, y_(value) + 4.5, "end", text);
    }
    line(left_, bottom_, kWidth - kRight, bottom_, "#444", 1);
    line(left_, kTop, left_, bottom_, "#444", 1);
    label(left_, 24, "start", figure_.title, "font-size=\"15\" font-weight=\"bold\"");
    label((left_ + kWidth - kRight) / 2, bottom_ + 40, "middle", figure_.x.title);
    if (!figure_.y.title.empty())
      label(0, 0, "middle", figure_.y.title,
            fmt::format("transform=\"translate(18 {:.1f}) rotate(-90)\"", (kTop + bottom_) / 2).c_str());
  }

  void guides() {
    const char* dashes = "stroke-dasharray=\"6 4\"";
    if (figure_.vertical) line(x_(*figure_.vertical), kTop, x_(*figure_.vertical), bottom_, "#222", 1.2);
    if (figure_.horizontal) line(left_, y_(*figure_.horizontal), kWidth - kRight, y_(*figure_.horizontal), "#222", 1.2);
    if (!figure_.identity) return;
    const double low = std::min(x_.range().first, y_.range().first),
                 high = std::max(x_.range().second, y_.range().second);
    line(x_(low), y_(low), x_(high), y_(high), "#777", 1.2, dashes);
  }

  void draw(const Series& series) {
    const std::string paint = colour(series.style);
    std::string path;
    for (size_t i = 0; i < series.x.size(); ++i)
      if (std::isfinite(series.x[i]) && std::isfinite(series.y[i]))
        path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", x_(series.x[i]), y_(series.y[i]));
    if (series.line)
      body_ += fmt::format("<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.5\"/>\n", path, paint);
    for (size_t i = 0; i < series.x.size(); ++i) {
      if (!x_.inside(series.x[i]) || !y_.inside(series.y[i])) continue;
      if (!series.low.empty() && series.upright)
        line(x_(series.x[i]), y_(series.low[i]), x_(series.x[i]), y_(series.high[i]), paint.c_str(), 1.8);
      else if (!series.low.empty())
        line(x_(series.low[i]), y_(series.y[i]), x_(series.high[i]), y_(series.y[i]), paint.c_str(), 1.8);
      const double radius = series.line && i + 1 == series.x.size() ? std::max(4.5, series.marker) : series.marker;
      if (radius > 0) body_ += symbol(series.style, x_(series.x[i]), y_(series.y[i]), radius);
    }
  }

  // Below the plot; returns the height of the whole.
  double legend() {
    std::set<std::string> seen;
    const double top = bottom_ + kBottom + 10, column = (kWidth - left_) / kLegendColumns;
    for (const Series& series : figure_.series) {
      if (seen.contains(series.name)) continue;
      const auto n = int(seen.size());
      const double x = left_ + column * (n % kLegendColumns), y = top + kLegendLine * (n / kLegendColumns);
      body_ += symbol(series.style, x + 6, y, 4.5);
      label(x + 18, y + 4.5, "start", series.name);
      seen.insert(series.name);
    }
    return top + kLegendLine * double((seen.size() + kLegendColumns - 1) / kLegendColumns);
  }

  const Figure& figure_;
  double left_, bottom_;
  Scale x_, y_;
  std::string body_;
};

}  // namespace

std::string to_svg(const Figure& figure) { return Drawing(figure).text(); }

std::string escape(const std::string& text) {
  std::string out;
  for (const char c : text)
    if (c == '<') out += "&lt;";
    else if (c == '>') out += "&gt;";
    else if (c == '&') out += "&amp;";
    else if (c == '"') out += "&quot;";
    else out += c;
  return out;
}

std::string symbol(int style, double x, double y, double r) {
  const std::string name = plotly_symbol(style), fill = fmt::format("fill=\"{}\"", colour(style));
  const auto polygon = [&](std::vector<std::pair<double, double>> points) {
    std::string text;
    for (const auto& [dx, dy] : points) text += fmt::format("{:.1f},{:.1f} ", x + r * dx, y + r * dy);
    return fmt::format("<polygon points=\"{}\" {}/>\n", text, fill);
  };
  if (name == "square") return polygon({{-.9, -.9}, {.9, -.9}, {.9, .9}, {-.9, .9}});
  if (name == "diamond") return polygon({{0, -1.25}, {1.25, 0}, {0, 1.25}, {-1.25, 0}});
  if (name == "triangle-up") return polygon({{0, -1.15}, {1.1, .8}, {-1.1, .8}});
  if (name == "triangle-down") return polygon({{0, 1.15}, {1.1, -.8}, {-1.1, -.8}});
  if (name == "cross")
    return polygon({{-.4, -1.1},
                    {.4, -1.1},
                    {.4, -.4},
                    {1.1, -.4},
                    {1.1, .4},
                    {.4, .4},
                    {.4, 1.1},
                    {-.4, 1.1},
                    {-.4, .4},
                    {-1.1, .4},
                    {-1.1, -.4},
                    {-.4, -.4}});
  if (name == "x")
    return polygon({{-1, -.5},
                    {-.5, -1},
                    {0, -.5},
                    {.5, -1},
                    {1, -.5},
                    {.5, 0},
                    {1, .5},
                    {.5, 1},
                    {0, .5},
                    {-.5, 1},
                    {-1, .5},
                    {-.5, 0}});
  if (name == "star") {
    std::vector<std::pair<double, double>> points;
    for (int i = 0; i < 10; ++i)
      points.emplace_back((i % 2 ? .55 : 1.3) * std::sin(i * M_PI / 5), -(i % 2 ? .55 : 1.3) * std::cos(i * M_PI / 5));
    return polygon(points);
  }
  return fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{:.1f}\" {}/>\n", x, y, r, fill);
}

}  // namespace assay::report
