// assay judge LOSSES.jsonl... --reference NAME -o DIR
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "report/report.h"
#include "study/losses.h"
#include "study/runner.h"

namespace assay::cli {
namespace {

struct Options {
  std::vector<fs::path> losses;
  std::string reference;
  fs::path output;
};

void run(const Options& options) {
  const study::ForeignLosses found = study::read_losses(options.losses, options.reference);
  const bool is_new = !fs::exists(options.output);
  report::Written written;
  try {
    study::study_of_records(found.plan, found.records, options.losses.front().string(),
                            options.output);
    written = report::write_report(options.output);
  } catch (...) {
    std::error_code ignored;
    if (is_new) fs::remove_all(options.output, ignored);
    throw;
  }
  std::string text = written.summary;
  for (const std::string& note : found.notes) text += "Note: " + note + "\n";
  text += fmt::format("Report: {}\n", written.page.string());
  print({{"report", written.page.string()},
         {"runs", written.runs},
         {"unit", found.unit},
         {"notes", found.notes},
         {"verdicts", written.verdicts}},
        text);
}

void add(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = subcommand(
      app, "judge", "verdicts from losses that any trainer measured (JSON Lines), with the report");
  command
      ->add_option("LOSSES", options->losses,
                   "files of losses: a line about each run, then a line per document or source")
      ->required();
  command
      ->add_option("--reference", options->reference,
                   "the model that the others are compared with; it needs two or more budgets")
      ->required();
  command->add_option("-o,--output", options->output, "folder for the report")->required();
  command->footer(
      "Examples:\n"
      "  assay judge losses/*.jsonl --reference transformer -o verdict\n"
      "  assay judge mine.jsonl reference.jsonl --reference base -o verdict --json\n");
  command->callback([=] { run(*options); });
}

const bool registered = commands().add("judge", add);

}  // namespace
}  // namespace assay::cli
