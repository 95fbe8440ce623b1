#pragma once
// The one list of tables and figures of a setting: the page, the files and the tests go through it.
#include <string>
#include <variant>
#include <vector>

#include "report/plots.h"
#include "report/table.h"

namespace assay::report {

struct Item {
  std::string section;                       // heading of the page; items of one section follow
  std::variant<Table, FigureGroup> content;  // each other
  bool folded = false;                       // closed at first
};

// Empty tables and groups are left out. The first item is the table of verdicts. Tables that are
// not `shown` exist as files only.
std::vector<Item> contents(const Setting& setting);

}  // namespace assay::report
