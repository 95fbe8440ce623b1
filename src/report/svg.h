#pragma once
// A figure as a standalone SVG file, with its legend.
#include "report/figures.h"

namespace assay::report {

std::string to_svg(const Figure& figure);
std::string escape(const std::string& text);  // for XML and HTML
// The symbol of a style, as an SVG element centred at (x, y).
std::string symbol(int style, double x, double y, double radius);

}  // namespace assay::report
