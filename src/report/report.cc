#include "report/report.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "report/answer.h"
#include "report/page.h"
#include "report/svg.h"
#include "report/tables.h"
#include "run/folder.h"

namespace assay::report {
namespace {

void write_table(const fs::path& study, const Table& table) {
  write_file(study / "tables" / (table.id + ".csv"), to_csv(table));
}

void write_files(const fs::path& study, const std::vector<Item>& items) {
  for (const Item& item : items) {
    if (const auto* table = std::get_if<Table>(&item.content)) {
      write_table(study, *table);
      continue;
    }
    for (const Figure& figure : std::get<FigureGroup>(item.content).figures)
      write_file(study / "figures" / (figure.id + ".svg"), to_svg(figure));
  }
}

// The first columns of the table of verdicts, what limits all of them, and why verdicts are open.
std::string verdict_summary(const Setting& setting, const Study& study) {
  Table table = verdict_table(setting);
  for (size_t c = 0; c < table.columns.size(); ++c) table.columns[c].shown = c < 9;
  std::string out = setting.name.empty() ? "" : setting.name + "\n";
  out += to_text(table);
  for (const std::string& caution : cautions(setting, study)) out += caution + "\n";
  if (!setting.ladder.problem.empty()) return out;
  for (const Architecture& a : setting.architectures) {
    const std::string& why = a.end.reason.empty() ? a.end.note : a.end.reason;
    if (a.style != 0 && !why.empty()) out += fmt::format("{}: {}\n", a.name, why);
  }
  return out;
}

std::string task_summary(const Setting& setting) {
  if (setting.task_scores.empty()) return "";
  std::string out = to_text(task_table(setting));
  for (const Agreement& found : task_agreements(setting))
    if (found.recall) out += found.text() + "\n";
  return out;
}

std::string summary(const Setting& setting, const Study& study) {
  return verdict_summary(setting, study) + task_summary(setting);
}

}  // namespace

int64_t write_variances(const fs::path& folder, const fs::path& file) {
  const Study study = analyse(folder);
  study::VarianceTable table;
  if (fs::exists(file)) table = read_record<study::VarianceTable>(file);
  std::erase_if(table.rows, [&](const auto& row) { return row.study == study.name; });
  int64_t written = 0;
  for (const Setting& setting : study.settings)
    for (study::VarianceRow& row : seed_variances(setting)) {
      table.rows.push_back(std::move(row));
      ++written;
    }
  write_file(file, to_json(table).dump(1) + "\n");
  return written;
}

Written write_report(const fs::path& study_folder, const fs::path& output) {
  if (!output.empty()) run::check_output_folder(output);
  const Study study = analyse(study_folder);
  const fs::path& folder = output.empty() ? study_folder : output;
  std::vector<SettingContents> settings;
  Written out{.page = folder / "report.html"};
  for (const Setting& setting : study.settings) {
    if (setting.architectures.empty()) continue;
    settings.push_back({&setting, contents(setting)});
    out.summary += summary(setting, study);
  }
  if (settings.empty())
    fail(
        "{}: None of its {} runs is finished, so there is nothing to report yet. "
        "`assay run` finishes them.",
        study_folder.string(), study.runs.size());
  if (output.empty() && ::access(folder.c_str(), W_OK) != 0)
    fail("{}: the folder cannot be written ({}). Give a folder with -o OUT. Nothing was written.",
         folder.string(), std::strerror(errno));
  make_folder(folder / "figures");
  make_folder(folder / "tables");
  for (const SettingContents& s : settings) write_files(folder, s.items);
  const std::vector<Table> provenance = {run_table(study), kernel_table(study)};
  for (const Table& table : provenance) write_table(folder, table);
  write_file(out.page, page(study, settings, provenance));
  out.verdicts = verdicts(study);
  out.tasks = tasks(study);
  out.runs =
      std::ranges::count_if(study.runs, [](const auto& run) { return run.finished.has_value(); });
  return out;
}

}  // namespace assay::report
