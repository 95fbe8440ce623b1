#include "report/heat_map.h"

#include <fmt/format.h>

#include <cmath>

#include "report/svg.h"

namespace assay::report {
namespace {

constexpr double kCell = 44;
constexpr double kRow = 26;
constexpr double kLeft = 76;
constexpr double kTop = 40;
constexpr double kBottom = 52;

// {0}: title, {1} and {2}: size
constexpr const char* kOpening = R"(<svg xmlns="http://www.w3.org/2000/svg" role="img"
  aria-label="{0}" viewBox="0 0 {1:.0f} {2:.0f}" width="{1:.0f}" height="{2:.0f}"
  font-family="sans-serif" font-size="11">
<rect class="paper" width="100%" height="100%" fill="#fff"/>
)";

// From vermilion (0) over white (0.5) to blue (1), which colour-blind readers can tell apart.
std::string paint(double share) {
  const double from[3] = {213, 94, 0};
  const double middle[3] = {255, 255, 255};
  const double to[3] = {0, 114, 178};
  int mixed[3];
  for (int i = 0; i < 3; ++i)
    mixed[i] = int(std::lround(share < 0.5 ? from[i] + (middle[i] - from[i]) * 2 * share
                                           : middle[i] + (to[i] - middle[i]) * (2 * share - 1)));
  return fmt::format("#{:02x}{:02x}{:02x}", mixed[0], mixed[1], mixed[2]);
}

std::string label(double x, double y, const std::string& text, const char* anchor = "middle",
                  const char* css_class = "ink", const char* colour = "#333") {
  return fmt::format(
      "<text class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" fill=\"{}\">{}</text>\n",
      css_class, x, y, anchor, colour, svg_text(text));
}

}  // namespace

std::string to_svg(const HeatMap& map) {
  const double width = kLeft + kCell * double(map.x.size()) + 16;
  const double bottom = kTop + kRow * double(map.y.size());
  const double height = bottom + kBottom;
  std::string out = fmt::format(kOpening, escape(plain_text(map.title)), width, height);
  out += label(kLeft, 18, map.title, "start");
  for (size_t row = 0; row < map.y.size(); ++row) {
    const double y = kTop + kRow * double(row);
    out += label(kLeft - 6, y + 17, map.y[row], "end");
    for (size_t column = 0; column < map.x.size(); ++column) {
      const double value = map.values[row][column];
      const double x = kLeft + kCell * double(column);
      if (std::isnan(value)) continue;
      out += fmt::format(
          R"(<rect x="{:.1f}" y="{:.1f}" width="{}" height="{}" fill="{}" stroke="#fff"/>)", x, y,
          kCell, kRow, paint(value));
      out += label(x + kCell / 2, y + 17, fmt::format("{:.2f}", value), "middle", "cell",
                   value < 0.2 || value > 0.8 ? "#fff" : "#000");
    }
  }
  for (size_t column = 0; column < map.x.size(); ++column)
    out += label(kLeft + kCell * (double(column) + 0.5), bottom + 16, map.x[column]);
  out += label(kLeft + kCell * double(map.x.size()) / 2, bottom + 36, map.x_title);
  const std::string turn = fmt::format("translate(14 {:.1f}) rotate(-90)", (kTop + bottom) / 2);
  out += fmt::format(
      "<text class=\"ink\" transform=\"{}\" text-anchor=\"middle\" fill=\"#333\">{}</text>\n", turn,
      svg_text(map.y_title));
  return out + "</svg>\n";
}

}  // namespace assay::report
