// assay report STUDY
#include "report/report.h"

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "run/folder.h"
#include "study/runner.h"

namespace assay::cli {
namespace {

using Json = nlohmann::json;

struct Options {
  fs::path study;
  fs::path output;
  fs::path records;
  fs::path variances;
  std::vector<fs::path> reuse;
};

// A folder of records has the plan, but no study.sqlite.
bool holds_records(const fs::path& folder) {
  return fs::exists(folder / "plan.json") && !fs::exists(folder / "study.sqlite");
}

void run(const Options& options) {
  if (!options.records.empty())
    run::check_output_folder(options.records, options.records / "plan.json");
  fs::path study = options.study;
  if (holds_records(options.study)) {
    if (options.output.empty())
      fail(
          "{}: The folder holds records of runs and no study. "
          "Give a folder for the report with -o OUT. Nothing was written.",
          options.study.string());
    study::study_of_records(options.study, options.output);
    study = options.output;
  } else if (!options.output.empty() && !fs::exists(options.study / "study.sqlite")) {
    fail(
        "{}: There is no plan.json of records and no study.sqlite in this folder. "
        "Nothing was written.",
        options.study.string());
  }
  const report::Written written =
      report::write_report(study, study == options.study ? options.output : fs::path());
  Json document = {
      {"report", written.page.string()}, {"runs", written.runs}, {"verdicts", written.verdicts}};
  if (!written.tasks.is_null()) document["tasks"] = written.tasks;
  std::string text = written.summary;
  if (!options.records.empty()) {
    const int64_t count = study::write_records(study, options.records, options.reuse);
    document["records"] = options.records.string();
    text += fmt::format("Records of {} runs: {}\n", count, options.records.string());
  }
  if (!options.variances.empty()) {
    const int64_t rows = report::write_variances(study, options.variances);
    document["variances"] = options.variances.string();
    text += fmt::format("Variances of {} budgets: {}\n", rows, options.variances.string());
  }
  text += fmt::format("Report: {}\n", written.page.string());
  print(document, text);
}

void add(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = subcommand(
      app, "report", "write the report of a study again: report.html, figures/*.svg, tables/*.csv",
      {"report study", "report records -o out"});
  command
      ->add_option("STUDY", options->study,
                   "folder of a study, or a folder of records written with --records")
      ->required();
  command->add_option("-o,--output", options->output,
                      "folder for the report; required when STUDY is a folder of records");
  command->add_option("--records", options->records,
                      "also write a compact record of every finished run, and the plan, "
                      "into this folder");
  command
      ->add_option("--reuse", options->reuse,
                   "with --records: folder of records whose runs are not written again; "
                   "plan.json names this folder")
      ->needs("--records");
  command->add_option("--variances", options->variances,
                      "also write the variances between seeds to this table (JSON), "
                      "which a plan can name; rows of other studies in it are kept");
  command->callback([=] { run(*options); });
}

const bool registered = commands().add("report", add);

}  // namespace
}  // namespace assay::cli
