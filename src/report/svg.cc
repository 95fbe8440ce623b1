#include "report/svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

namespace assay::report {
namespace {

constexpr double kRight = 16;
constexpr double kTop = 36;
constexpr double kBottom = 50;
constexpr double kLegendLine = 20;
constexpr double kBarWidth = 250;
constexpr double kBarRow = 18;    // height
constexpr double kBarLabel = 22;  // width of the labels
constexpr double kBarSide = 20;   // half the width of a tick label

// {0} and {1}: size, {2} to {5}: the clipped rectangle, {6}: the drawing, {7}: title,
// {8}: description, {9}: id
constexpr const char* kDocument = R"(<svg xmlns="http://www.w3.org/2000/svg"
  id="{9}" role="img" aria-labelledby="title-{9} desc-{9}" viewBox="0 0 {0} {1}"
  width="{0}" height="{1}" font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#222">
<title id="title-{9}">{7}</title>
<desc id="desc-{9}">{8}</desc>
<rect class="paper" width="100%" height="100%" fill="#fff"/>
<clipPath id="clip-{9}">
<rect x="{2:.1f}" y="{3:.1f}" width="{4:.1f}" height="{5:.1f}"/>
</clipPath>
{6}</svg>
)";

// {0}: width
constexpr const char* kBarAxis = R"(<svg aria-hidden="true" viewBox="0 0 {0} 16"
  width="{0}" height="16" font-size="11" font-family="Helvetica, Arial, sans-serif" fill="#222">
)";

using Ticks = std::vector<std::pair<double, std::string>>;

std::string tick_text(double value, int digits) {
  if (std::abs(value) >= 1e9) return fmt::format("{:g}G", value / 1e9);
  if (std::abs(value) >= 1e6) return fmt::format("{:g}M", value / 1e6);
  if (std::abs(value) >= 1e4) return fmt::format("{:g}k", value / 1e3);
  const std::string text = fmt::format("{:.{}f}", std::abs(value), digits);
  return (value < 0 ? "−" : "") + text;
}

size_t letters(const std::string& utf8) {
  return size_t(std::ranges::count_if(utf8, [](char c) { return (c & 0xC0) != 0x80; }));
}

Ticks round_ticks(double low, double high, double wanted) {
  const double rough = (high - low) / wanted;
  const double power = std::pow(10, std::floor(std::log10(rough)));
  const double ratio = rough / power;
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
    for (const double factor : {1, 2, 5}) {
      const double value = decade * factor;
      if (value < low || value > high || (!few && factor != 1)) continue;
      out.emplace_back(value, decade < 1e4 ? fmt::format("{:g}", value) : tick_text(value, 0));
    }
  return out;
}

// From a value to its position in the drawing.
class Scale {
 public:
  Scale(const Figure& figure, bool vertical, double from, double to)
      : axis_(vertical ? figure.y : figure.x),
        range_(shown_range(figure, vertical)),
        from_(from),
        to_(to) {}
  double operator()(double value) const {
    const double a = map(range_.first);
    const double b = map(range_.second);
    return from_ + (map(value) - a) / (b - a) * (to_ - from_);
  }
  bool inside(double value) const {
    const auto [low, high] = std::minmax(range_.first, range_.second);
    return std::isfinite(value) && value >= low && value <= high;
  }
  Ticks ticks() const {
    if (!axis_.ticks.empty()) return axis_.ticks;
    const auto [low, high] = std::minmax(range_.first, range_.second);
    return axis_.log ? decade_ticks(low, high) : round_ticks(low, high, 6);
  }
  std::pair<double, double> range() const { return range_; }

 private:
  double map(double value) const { return axis_.log ? std::log10(value) : value; }
  const Axis& axis_;
  std::pair<double, double> range_;
  double from_;
  double to_;
};

// Room for the title of the vertical axis and for the longest label, at 8.4 pixels per letter: as
// wide as a bold letter is in wide fonts.
double left_margin(const Figure& figure) {
  size_t longest = 0;
  for (const auto& [at, text] : Scale(figure, true, 1, 0).ticks())
    longest = std::max(longest, letters(text));
  const double title = figure.y.title.empty() ? 4 : 24;
  return std::max(66.0, title + 8.4 * double(longest) + 8);
}

std::string css(int style) { return fmt::format("s{}", palette(style)); }

std::string line_element(double x1, double y1, double x2, double y2, const std::string& css_class,
                         const char* paint, double width, const char* more = "") {
  const std::string ends =
      fmt::format(R"(x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}")", x1, y1, x2, y2);
  return fmt::format("<line class=\"{}\" {} stroke=\"{}\" stroke-width=\"{}\"{}/>\n", css_class,
                     ends, paint, width, more);
}

std::string band_element(double x, double y, double width, double height) {
  const std::string place =
      fmt::format(R"(x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}")", x, y, width, height);
  return fmt::format("<rect class=\"band\" {} fill=\"#e8eef5\"/>\n", place);
}

std::string short_number(double value) {
  if (std::abs(value) >= 1e4) return tick_text(value, 0);
  return fmt::format("{:.4g}", value);
}

class Drawing {
 public:
  explicit Drawing(const Figure& figure)
      : figure_(figure),
        left_(left_margin(figure)),
        right_(figure.width - kRight),
        bottom_(double(figure.height) - kBottom),
        x_(figure, false, left_, right_),
        y_(figure, true, bottom_, kTop) {}

  std::string text() {
    axes();
    body_ += fmt::format("<g clip-path=\"url(#clip-{})\">\n", escape(figure_.id));
    guides();
    for (const Series& series : figure_.series) draw(series);
    body_ += "</g>\n";
    const double height = legend();
    return fmt::format(kDocument, figure_.width, height, left_, kTop, right_ - left_,
                       bottom_ - kTop, body_, escape(plain_text(figure_.title)),
                       escape(plain_text(description())), escape(figure_.id));
  }

 private:
  std::string description() const {
    std::string out = fmt::format("Horizontal axis: {}.", figure_.x.title);
    if (!figure_.y.title.empty()) out += fmt::format(" Vertical axis: {}.", figure_.y.title);
    std::set<std::string> seen;
    for (const Series& series : figure_.series) {
      if (series.name.empty() || seen.contains(series.name)) continue;
      out += seen.empty() ? " Shown: " : ", ";
      out += series.name;
      seen.insert(series.name);
    }
    return out + ".";
  }

  void line(double x1, double y1, double x2, double y2, const char* css_class, const char* paint,
            double width, const char* more = "") {
    body_ += line_element(x1, y1, x2, y2, css_class, paint, width, more);
  }
  void label(double x, double y, const char* anchor, const std::string& text,
             const std::string& more = "") {
    body_ += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\"{}>{}</text>\n", x, y,
                         anchor, more, svg_text(text));
  }

  void axes() {
    for (const auto& [value, text] : x_.ticks()) {
      line(x_(value), kTop, x_(value), bottom_, "grid", "#e5e5e5", 1);
      label(x_(value), bottom_ + 18, "middle", text);
    }
    for (const auto& [value, text] : y_.ticks()) {
      const bool strong = text.ends_with('\t');  // the main row of a group
      line(left_, y_(value), right_, y_(value), "grid", "#e5e5e5", 1);
      label(left_ - 8, y_(value) + 4.5, "end", strong ? text.substr(0, text.size() - 1) : text,
            strong ? " font-weight=\"bold\"" : "");
    }
    line(left_, bottom_, right_, bottom_, "frame", "#444", 1);
    line(left_, kTop, left_, bottom_, "frame", "#444", 1);
    label(12, 22, "start", figure_.title, " font-size=\"15\" font-weight=\"bold\"");
    label((left_ + right_) / 2, bottom_ + 40, "middle", figure_.x.title);
    if (!figure_.y.title.empty())
      label(0, 0, "middle", figure_.y.title,
            fmt::format(" transform=\"translate(16 {:.1f}) rotate(-90)\"", (kTop + bottom_) / 2));
  }

  void guides() {
    if (figure_.band > 0 && figure_.vertical)
      band(x_(*figure_.vertical - figure_.band), kTop, x_(*figure_.vertical + figure_.band),
           bottom_);
    if (figure_.band > 0 && figure_.horizontal)
      band(left_, y_(*figure_.horizontal + figure_.band), right_,
           y_(*figure_.horizontal - figure_.band));
    if (figure_.vertical)
      line(x_(*figure_.vertical), kTop, x_(*figure_.vertical), bottom_, "frame", "#444", 1.4);
    if (figure_.horizontal)
      line(left_, y_(*figure_.horizontal), right_, y_(*figure_.horizontal), "frame", "#444", 1.4);
    if (!figure_.identity) return;
    const double low = std::min(x_.range().first, y_.range().first);
    const double high = std::max(x_.range().second, y_.range().second);
    if (y_.range().first > x_.range().second || y_.range().second < x_.range().first) {
      const bool below = y_.range().first > x_.range().second;
      label(right_ - 6, below ? bottom_ - 8 : kTop + 14, "end",
            below ? "identity: below this range" : "identity: above this range",
            " class=\"faint\" fill=\"#666\" font-size=\"11\"");
      return;
    }
    line(x_(low), y_(low), x_(high), y_(high), "faint", "#777", 1.2, " stroke-dasharray=\"6 4\"");
    label(right_ - 6, bottom_ - 8, "end", "dashed: both losses are equal",
          " class=\"faint\" fill=\"#666\" font-size=\"11\"");
  }
  void band(double x1, double y1, double x2, double y2) {
    body_ += band_element(x1, y1, x2 - x1, y2 - y1);
  }

  void draw(const Series& series) {
    const char* paint = colour(series.style);
    const std::string css_class = css(series.style);
    std::string path;
    for (size_t i = 0; i < series.x.size(); ++i)
      if (std::isfinite(series.x[i]) && std::isfinite(series.y[i]))
        path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", x_(series.x[i]),
                            y_(series.y[i]));
    if (series.line && !path.empty()) {
      body_ += fmt::format(R"(<path class="{}" d="{}" fill="none" stroke="{}" stroke-width="1.5">)",
                           css_class, path, paint);
      body_ += fmt::format("<title>{}</title></path>\n", escape(series.name));
    }
    for (size_t i = 0; i < series.x.size(); ++i) {
      if (!x_.inside(series.x[i]) || !y_.inside(series.y[i])) continue;
      const double x = x_(series.x[i]);
      const double y = y_(series.y[i]);
      if (!series.low.empty() && std::isfinite(series.low[i]) && std::isfinite(series.high[i])) {
        if (series.upright)
          line(x, y_(series.low[i]), x, y_(series.high[i]), css_class.c_str(), paint, 1.8);
        else line(x_(series.low[i]), y, x_(series.high[i]), y, css_class.c_str(), paint, 1.8);
      }
      const bool last_of_line = series.line && i + 1 == series.x.size() && series.marker > 0;
      const double radius = last_of_line ? std::max(4.5, series.marker) : series.marker;
      if (radius > 0) body_ += symbol(series.style, x, y, radius, series.hollow, tip(series, i));
    }
  }

  std::string tip(const Series& series, size_t i) const {
    if (i < series.tips.size()) return series.tips[i];
    std::string out = fmt::format("{}: {}, {}", series.name, short_number(series.x[i]),
                                  short_number(series.y[i]));
    if (!series.low.empty() && std::isfinite(series.low[i]))
      out = fmt::format("{}: {:.3f} [{:.3f}, {:.3f}]", series.name,
                        series.upright ? series.y[i] : series.x[i], series.low[i], series.high[i]);
    return out;
  }

  // Below the plot; returns the height of the drawing.
  double legend() {
    std::vector<const Series*> entries;
    std::set<std::string> seen;
    size_t longest = 0;
    for (const Series& series : figure_.series) {
      if (series.name.empty() || !seen.insert(series.name).second) continue;
      entries.push_back(&series);
      longest = std::max(longest, letters(series.name));
    }
    const double width = double(figure_.width) - 24;
    const auto fit = size_t(width / (30 + 7.2 * double(longest)));
    const size_t columns = std::clamp<size_t>(fit, 1, 4);
    const double top = bottom_ + kBottom + 12;
    for (size_t n = 0; n < entries.size(); ++n) {
      const double x = 18 + width / double(columns) * double(n % columns);
      const double y = top + kLegendLine * double(n / columns);
      body_ += symbol(entries[n]->style, x, y, 4.5, entries[n]->hollow);
      label(x + 12, y + 4.5, "start", entries[n]->name);
    }
    const size_t rows = (entries.size() + columns - 1) / columns;
    return std::ceil(top + kLegendLine * double(rows) - (rows ? 4 : 12));
  }

  const Figure& figure_;
  double left_;
  double right_;
  double bottom_;
  Scale x_;
  Scale y_;
  std::string body_;
};

std::string replace_all(std::string text, const std::string& from, const std::string& to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
  return text;
}

double bar_place(double value, const BarScale& scale) {
  const double share = (value - scale.low) / (scale.high - scale.low);
  const double width = kBarWidth - kBarLabel - 2 * kBarSide;
  return kBarLabel + kBarSide + std::clamp(share, 0.0, 1.0) * width;
}

std::vector<std::pair<double, double>> outline(Shape shape) {
  switch (shape) {
    case Shape::square:
      return {{-.9, -.9}, {.9, -.9}, {.9, .9}, {-.9, .9}};
    case Shape::diamond:
      return {{0, -1.25}, {1.25, 0}, {0, 1.25}, {-1.25, 0}};
    case Shape::triangle_up:
      return {{0, -1.15}, {1.1, .8}, {-1.1, .8}};
    case Shape::triangle_down:
      return {{0, 1.15}, {1.1, -.8}, {-1.1, -.8}};
    case Shape::cross:
      return {{-.4, -1.1}, {.4, -1.1}, {.4, -.4}, {1.1, -.4}, {1.1, .4},   {.4, .4},
              {.4, 1.1},   {-.4, 1.1}, {-.4, .4}, {-1.1, .4}, {-1.1, -.4}, {-.4, -.4}};
    case Shape::saltire:
      return {{-1, -.5}, {-.5, -1}, {0, -.5}, {.5, -1}, {1, -.5}, {.5, 0},
              {1, .5},   {.5, 1},   {0, .5},  {-.5, 1}, {-1, .5}, {-.5, 0}};
    case Shape::star: {
      std::vector<std::pair<double, double>> points;
      for (int i = 0; i < 10; ++i) {
        const double radius = i % 2 ? .55 : 1.3;
        points.emplace_back(radius * std::sin(i * M_PI / 5), -radius * std::cos(i * M_PI / 5));
      }
      return points;
    }
    default:
      return {};
  }
}

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

std::string plain_text(const std::string& text) { return replace_all(text, "Δ_end", "Δ end"); }

std::string html_text(const std::string& text) {
  return replace_all(escape(text), "Δ_end", "Δ<sub>end</sub>");
}

std::string svg_text(const std::string& text) {
  return replace_all(
      escape(text), "Δ_end",
      "Δ<tspan dy=\"3\" font-size=\"75%\">end</tspan><tspan dy=\"-3\">&#8203;</tspan>");
}

std::string symbol(int style, double x, double y, double r, bool hollow, const std::string& tip) {
  const std::string title = tip.empty() ? "" : fmt::format("<title>{}</title>", escape(tip));
  const std::string paint =
      hollow ? fmt::format("class=\"{} hollow\" fill=\"#fff\" stroke=\"{}\" stroke-width=\"1.4\"",
                           css(style), colour(style))
             : fmt::format("class=\"{} solid\" fill=\"{}\"", css(style), colour(style));
  const auto points = outline(shape(style));
  const std::string end = tip.empty() ? "/>\n" : fmt::format(">{}", title);
  if (points.empty())
    return fmt::format("<circle {} cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{:.1f}\"{}{}", paint, x, y, r,
                       end, tip.empty() ? "" : "</circle>\n");
  std::string text;
  for (const auto& [dx, dy] : points)
    text += fmt::format("{}{:.1f},{:.1f}", text.empty() ? "" : " ", x + r * dx, y + r * dy);
  return fmt::format("<polygon {} points=\"{}\"{}{}", paint, text, end,
                     tip.empty() ? "" : "</polygon>\n");
}

std::string interval_bars(const std::vector<BarRow>& rows, const BarScale& scale, int style,
                          const std::string& tip) {
  const double height = kBarRow * double(rows.size());
  const auto at = [&](double value) { return bar_place(value, scale); };
  std::string out = fmt::format(
      R"(<svg role="img" aria-label="{0}" viewBox="0 0 {1} {2}" width="{1}" height="{2}" {3}>)",
      escape(tip), kBarWidth, height, R"(font-size="11" fill="#222")");
  out += fmt::format("<title>{}</title>", escape(tip));
  double top = 0;
  for (const BarRow& row : rows) {
    const double middle = top + kBarRow / 2;
    out += band_element(at(-row.margin), top, at(row.margin) - at(-row.margin), kBarRow);
    out += fmt::format("<text x=\"2\" y=\"{:.1f}\">{}</text>", middle + 4, escape(row.label));
    if (std::isfinite(row.interval.low) && std::isfinite(row.interval.high)) {
      const std::string path =
          fmt::format("M{0:.1f} {2}H{1:.1f}M{0:.1f} {3}V{4}M{1:.1f} {3}V{4}", at(row.interval.low),
                      at(row.interval.high), middle, middle - 4, middle + 4);
      out += fmt::format(R"(<path class="{}" d="{}" fill="none" stroke="{}" stroke-width="2"/>)",
                         css(style), path, colour(style));
      out += symbol(style, at(row.interval.estimate), middle, 4.5, row.hollow);
    }
    top += kBarRow;
  }
  out += line_element(at(0), 0, at(0), height, "frame", "#444", 1.4);
  return out + "</svg>";
}

std::string interval_axis(const BarScale& scale) {
  std::string out = fmt::format(kBarAxis, kBarWidth);
  for (const auto& [value, text] : round_ticks(scale.low, scale.high, 6)) {
    const std::string sign = value > 1e-12 ? "+" : "";
    out += fmt::format("<text x=\"{:.1f}\" y=\"12\" text-anchor=\"middle\">{}{}</text>",
                       bar_place(value, scale), sign, text);
  }
  return out + "</svg>";
}

}  // namespace assay::report
