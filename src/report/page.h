#pragma once
// report.html: one file that opens without a network, on a phone, on paper and in dark mode.
#include "report/analysis.h"
#include "report/contents.h"

namespace assay::report {

struct SettingContents {
  const Setting* setting;
  std::vector<Item> items;
};
std::string page(const Study& study, const std::vector<SettingContents>& settings,
                 const std::vector<Table>& provenance);

}  // namespace assay::report
