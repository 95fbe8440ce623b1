#include "report/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/progress.h"
#include "report/svg.h"

namespace assay::report {
namespace {

constexpr size_t kLongText = 40;  // letters; a longer text may be broken into lines

std::string bytes(double value) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  for (; value >= 1024 && unit < 4; value /= 1024) ++unit;
  return fmt::format("{:.{}f} {}", value, unit == 0 || value >= 100 ? 0 : 1, units[unit]);
}

std::string signed_number(double value) {
  const std::string digits = fmt::format("{:.3f}", std::abs(value));
  return (value < 0 ? "−" : "+") + digits;
}

std::string show(double value, Format format) {
  if (!std::isfinite(value)) return "–";
  switch (format) {
    case Format::change:
      return signed_number(value);
    case Format::ratio:
      return fmt::format("{:.2f}", value);
    case Format::factor:
      return fmt::format("{:.3g}", value);
    case Format::count:
      return Progress::count(value);
    case Format::tokens:
      return value >= 1e9   ? fmt::format("{:.4g}B", value / 1e9)
             : value >= 1e6 ? fmt::format("{:.4g}M", value / 1e6)
             : value >= 1e3 ? fmt::format("{:.4g}k", value / 1e3)
                            : fmt::format("{:.0f}", value);
    case Format::bytes:
      return bytes(value);
    case Format::seconds:
      return Progress::duration(value);
    case Format::percent:
      return fmt::format("{:.2f} %", value);
    default:
      return fmt::format("{:.3f}", value);
  }
}

std::string show(const stats::Interval& interval, Format format) {
  if (!std::isfinite(interval.low) || !std::isfinite(interval.high))
    return show(interval.estimate, format);
  return fmt::format("{} [{}, {}]", show(interval.estimate, format), show(interval.low, format),
                     show(interval.high, format));
}

bool is_empty(const Table& table, size_t column) {
  const auto empty = [&](auto& row) {
    const auto* text = std::get_if<std::string>(&row[column]);
    return text && text->empty();
  };
  return std::ranges::all_of(table.rows, empty);
}
bool in_page(const Table& table, size_t column) {
  return table.columns[column].shown && !is_empty(table, column);
}
bool in_text(const Table& table, size_t column) {
  return in_page(table, column) && table.columns[column].filed;
}

bool is_interval(const Table& table, size_t column) {
  return std::ranges::any_of(
      table.rows, [&](auto& row) { return std::holds_alternative<stats::Interval>(row[column]); });
}

std::string csv(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string out = "\"";
  for (const char c : text) out += c == '"' ? std::string("\"\"") : std::string(1, c);
  return out + "\"";
}
std::string csv(double value) { return std::isfinite(value) ? fmt::format("{}", value) : ""; }

std::string csv_cell(const Cell& cell, bool interval) {
  if (const auto* text = std::get_if<std::string>(&cell))
    return csv(*text) + (interval ? ",," : "");
  if (const auto* value = std::get_if<double>(&cell)) return csv(*value) + (interval ? ",," : "");
  if (const auto* rich = std::get_if<Rich>(&cell)) return csv(rich->text);
  const auto& i = std::get<stats::Interval>(cell);
  return csv(i.estimate) + "," + csv(i.low) + "," + csv(i.high);
}

size_t letters(const std::string& utf8) {
  return size_t(std::ranges::count_if(utf8, [](char c) { return (c & 0xC0) != 0x80; }));
}

}  // namespace

std::string show(const Cell& cell, Format format) {
  if (const auto* value = std::get_if<double>(&cell)) return show(*value, format);
  if (const auto* interval = std::get_if<stats::Interval>(&cell)) return show(*interval, format);
  if (const auto* rich = std::get_if<Rich>(&cell)) return rich->text;
  const auto& text = std::get<std::string>(cell);
  return format == Format::code && text.size() > 12 ? text.substr(0, 12) + "…" : text;
}

std::string to_csv(const Table& table) {
  std::vector<std::string> header;
  std::vector<std::pair<size_t, bool>> columns;  // with whether it holds intervals
  for (size_t c = 0; c < table.columns.size(); ++c) {
    if (!table.columns[c].filed) continue;
    columns.emplace_back(c, is_interval(table, c));
    const std::string name = table.columns[c].name;
    header.push_back(csv(name));
    if (!columns.back().second) continue;
    header.push_back(csv(name + " low"));
    header.push_back(csv(name + " high"));
  }
  std::string out = join(header, ",") + "\n";
  for (const auto& row : table.rows) {
    std::vector<std::string> cells;
    for (const auto& [c, interval] : columns) cells.push_back(csv_cell(row[c], interval));
    out += join(cells, ",") + "\n";
  }
  return out;
}

namespace {

// Lets a browser break a name after an underscore, where the style sheet shows <wbr>.
std::string breakable(const std::string& html) {
  std::string out;
  for (const char c : html) {
    out += c;
    if (c == '_') out += "<wbr>";
  }
  return out;
}

std::string html_cell(const Table& table, const std::vector<Cell>& row, size_t c, bool first) {
  const Column& column = table.columns[c];
  const auto* whole = std::get_if<std::string>(&row[c]);
  const auto* rich = std::get_if<Rich>(&row[c]);
  std::string attributes;
  if (first) attributes += " scope=\"row\"";
  if (column.format > Format::code) attributes += " class=\"n\"";
  else if (whole && show(row[c], column.format).size() > kLongText) attributes += " class=\"long\"";
  else if (!column.filed && column.markup.size() > 0) attributes += " class=\"drawing\"";
  if (table.cards)
    attributes += fmt::format(" role=\"{}\" data-label=\"{}\"", first ? "rowheader" : "cell",
                              escape(column.name));
  if (column.format == Format::code && whole)
    attributes += fmt::format(" title=\"{}\"", escape(*whole));
  const std::string content = rich ? rich->html : breakable(html_text(show(row[c], column.format)));
  const char* tag = first ? "th" : "td";
  return fmt::format("<{}{}>{}</{}>", tag, attributes, content, tag);
}

}  // namespace

std::string to_html(const Table& table) {
  const char* role = table.cards ? " class=\"cards\" role=\"table\"" : "";
  const char* row_role = table.cards ? " role=\"row\"" : "";
  const char* header_role = table.cards ? " role=\"columnheader\"" : "";
  std::string out = fmt::format(
      "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{0}\"><table{1}>\n"
      "<caption class=\"hidden\">{0}</caption>\n<thead><tr{2}>",
      escape(table.title), role, row_role);
  for (size_t c = 0; c < table.columns.size(); ++c) {
    if (!in_page(table, c)) continue;
    const Column& column = table.columns[c];
    out += fmt::format("<th scope=\"col\"{}{}>{}{}</th>", header_role,
                       column.format > Format::code ? " class=\"n\"" : "",
                       breakable(html_text(column.name)), column.markup);
  }
  out += "</tr></thead>\n<tbody>\n";
  for (const auto& row : table.rows) {
    out += fmt::format("<tr{}>", row_role);
    for (size_t c = 0; c < row.size(); ++c)
      if (in_page(table, c)) out += html_cell(table, row, c, c == 0);
    out += "</tr>\n";
  }
  return out + "</tbody></table></div>\n";
}

std::string to_text(const Table& table) {
  std::vector<std::vector<std::string>> lines(table.rows.size() + 1);
  std::vector<size_t> columns;
  for (size_t c = 0; c < table.columns.size(); ++c)
    if (in_text(table, c)) columns.push_back(c);
  for (const size_t c : columns) {
    lines[0].push_back(table.columns[c].name);
    for (size_t r = 0; r < table.rows.size(); ++r)
      lines[r + 1].push_back(show(table.rows[r][c], table.columns[c].format));
  }
  std::string out;
  std::vector<size_t> widths(columns.size(), 0);
  for (const auto& line : lines)
    for (size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], letters(line[i]));
  for (const auto& line : lines) {
    std::string text;
    for (size_t i = 0; i < line.size(); ++i) {
      const std::string padding(widths[i] - letters(line[i]), ' ');
      text +=
          (i ? "  " : "") + (table.columns[columns[i]].format <= Format::code ? line[i] + padding
                                                                              : padding + line[i]);
    }
    out += text.substr(0, text.find_last_not_of(' ') + 1) + "\n";
  }
  return out;
}

}  // namespace assay::report
