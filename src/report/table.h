#pragma once
// A table as data, written as HTML or text for people and as CSV, with every digit, for programs.
#include <limits>
#include <string>
#include <variant>
#include <vector>

#include "stats/degradation.h"

namespace assay::report {

enum class Format {
  text,
  code,     // an identifier: shortened in the page, whole in the CSV
  loss,     // 3.912; an interval: 0.120 [0.081, 0.163]
  change,   // the same with its sign
  ratio,    // 1.07
  factor,   // 1.07, 0.000375
  count,    // 12.3M
  tokens,   // 40M: a budget
  bytes,    // 1.2 GiB
  seconds,  // 3:07
  percent,  // 4.2 %
};

struct Column {
  std::string name;
  Format format = Format::text;
  bool shown = true;        // in the page; false: CSV only
  bool filed = true;        // in CSV and text; false: page only
  std::string markup = {};  // HTML after the name, in the page only
};
// A text with its own HTML in the page.
struct Rich {
  std::string text;
  std::string html;
};
using Cell = std::variant<std::string, double, stats::Interval, Rich>;  // NaN: nothing to show

struct Table {
  // id: the name of the CSV file
  std::string id;
  std::string title;
  std::string note;
  std::vector<Column> columns;
  std::vector<std::vector<Cell>> rows = {};
  bool shown = true;   // in the page; false: CSV only
  bool cards = false;  // on a narrow screen, one block per row in place of a wide table
};

std::string show(const Cell& cell, Format format);
// The page leaves out columns of text that are empty throughout. In a CSV, a column of intervals
// becomes three: NAME, NAME low, NAME high.
std::string to_csv(const Table& table);
std::string to_html(const Table& table);
std::string to_text(const Table& table);  // columns aligned, for a terminal

}  // namespace assay::report
