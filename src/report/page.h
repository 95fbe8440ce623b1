#pragma once
// report.html: one file that opens without a network.
#include "report/analysis.h"
#include "report/plots.h"
#include "report/table.h"

namespace assay::report {

struct Section {  // of one setting
  const Setting* setting;
  std::vector<FigureGroup> figures;
  Table losses, degradation, convergence, slices, probes, speed, differing, common;
};
std::string page(const Study& study, const std::vector<Section>& sections, const Table& runs);

}  // namespace assay::report
