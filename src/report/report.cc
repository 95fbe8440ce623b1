#include "report/report.h"

#include <algorithm>

#include "base/error.h"
#include "report/page.h"
#include "report/svg.h"
#include "report/tables.h"

namespace assay::report {
namespace {

Section section_of(const Setting& setting) {
  Section out{&setting,
              {},
              loss_table(setting),
              degradation_table(setting),
              convergence_table(setting),
              slice_table(setting),
              probe_table(setting),
              speed_table(setting),
              differing_table(setting),
              common_table(setting)};
  out.figures.push_back(forest_plots(setting));
  out.figures.push_back(ablation_plots(setting));
  for (const Kind kind : setting.kinds) out.figures.push_back(scatter_plots(setting, kind));
  out.figures.push_back(training_curves(setting));
  out.figures.push_back(entropy_plots(setting));
  return out;
}

void write_table(const fs::path& study, const Table& table) {
  write_file(study / "tables" / (table.id + ".csv"), to_csv(table));
}

void write_files(const fs::path& study, const Section& s) {
  for (const FigureGroup& group : s.figures)
    for (const Figure& figure : group.figures) write_file(study / "figures" / (figure.id + ".svg"), to_svg(figure));
  for (const Table* table :
       {&s.losses, &s.degradation, &s.convergence, &s.slices, &s.probes, &s.speed, &s.differing, &s.common})
    write_table(study, *table);
  write_table(study, slice_detail_table(*s.setting));
  write_table(study, evaluation_table(*s.setting));
  if (const Table entropy = entropy_table(*s.setting); !entropy.rows.empty()) write_table(study, entropy);
}

fs::path write(const fs::path& folder) {
  const Study study = analyse(folder);
  std::vector<Section> sections;
  for (const Setting& setting : study.settings)
    if (!setting.architectures.empty()) sections.push_back(section_of(setting));
  if (sections.empty())
    fail("{}: none of its {} runs is finished; nothing to report yet. `assay run` finishes them.", folder.string(),
         study.runs.size());
  make_folder(folder / "figures"), make_folder(folder / "tables");
  for (const Section& section : sections) write_files(folder, section);
  const Table runs = run_table(study);
  write_table(folder, runs);
  write_file(folder / "report.html", page(study, sections, runs));
  return folder / "report.html";
}
}  // namespace

fs::path write_report(const fs::path& folder) {
  try {
    return write(folder);
  } catch (const Json::exception& error) {
    fail("{}: not as this version of Assay writes studies ({}); run the plan again into another folder",
         folder.string(), error.what());
  }
}

}  // namespace assay::report
