#pragma once
// Figures as SVG. The same text is a file of its own and part of the page: presentation attributes
// give it light colours, and the classes let the style sheet of the page replace them.
//   paper, frame, grid, ink, faint, band    background, axes, grid lines, text, guides, margin
//   s0, s1, …, s8                           colours of the series
#include <vector>

#include "report/figures.h"
#include "stats/uncertainty.h"

namespace assay::report {

std::string to_svg(const Figure& figure);
std::string escape(const std::string& text);  // for XML and HTML
// `text` escaped, with "Δ_end" as Δ and a subscript: as HTML, and as the content of an SVG <text>.
// In plain_text, for attributes and tooltips, it is "Δ end".
std::string plain_text(const std::string& text);
std::string html_text(const std::string& text);
std::string svg_text(const std::string& text);
// The symbol of a style, as an SVG element centred at (x, y).
std::string symbol(int style, double x, double y, double radius, bool hollow = false,
                   const std::string& tip = "");

// The axis that all rows of the table of verdicts share.
struct BarScale {
  double low = 0;
  double high = 0;
};
struct BarRow {
  std::string label;
  stats::Interval interval;  // NaN: nothing is drawn
  double margin = 0;         // half-width of the band around zero
  bool hollow = false;       // the interval carries no verdict
};
// Intervals one below the other.
std::string interval_bars(const std::vector<BarRow>& rows, const BarScale& scale, int style,
                          const std::string& tip);
std::string interval_axis(const BarScale& scale);  // tick labels above such rows

}  // namespace assay::report
