#pragma once
// A heat map of shares between 0 and 1 as SVG, with the value written in each cell.
#include <string>
#include <vector>

namespace assay::report {

struct HeatMap {
  std::string title;
  std::string x_title;
  std::string y_title;
  // labels of columns and rows
  std::vector<std::string> x;
  std::vector<std::string> y;
  std::vector<std::vector<double>> values;  // [row][column]; NaN: an empty cell
};
std::string to_svg(const HeatMap& map);

}  // namespace assay::report
