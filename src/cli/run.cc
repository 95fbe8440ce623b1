// assay run PLAN.toml -o STUDY
#include <nlohmann/json.hpp>

#include "base/progress.h"
#include "cli/command.h"
#include "report/report.h"
#include "report/table.h"
#include "study/runner.h"

namespace assay::cli {
namespace {

using Json = nlohmann::json;

struct Options {
  study::StudyOptions study;
  bool dry_run = false;
};

// With the figures that controls are matched by: parameters, and what a sequence of 100k tokens
// leaves as state.
constexpr const char* kLine = "{:<32} {:>10} {:>12} {:>10} {:>10} {:>8} {:>9}\n";

std::string line(const study::ExpectedRun& run) {
  const run::Estimate& e = run.estimate;
  return fmt::format(kLine, run.name, Progress::count(double(e.parameters)),
                     report::show(double(e.state_bytes.at_long), report::Format::bytes),
                     Progress::count(double(e.tokens)),
                     fmt::format("{:.2e}", 3 * double(e.tokens) * e.flops_per_token), e.steps,
                     run.found.empty() ? Progress::duration(e.estimated_seconds) : "done");
}

void show_dry_run(const study::StudyOptions& options) {
  std::string text =
      fmt::format(kLine, "run", "parameters", "state, 100k", "tokens", "FLOPs", "steps", "time");
  Json runs = Json::array();
  double seconds = 0;
  int64_t done = 0;
  for (const study::ExpectedRun& run : study::dry_run(options)) {
    text += line(run);
    Json row = to_json(run.estimate);
    row["name"] = run.name;
    row["key"] = run.key;
    row["config"] = run.config.string();
    row["found"] = run.found;
    if (run.found.empty()) seconds += run.estimate.estimated_seconds;
    else ++done;
    runs.push_back(std::move(row));
  }
  text += fmt::format("{} runs, {} of them done; {} for the others, one after another.",
                      runs.size(), done, Progress::duration(seconds));
  print({{"runs", runs}, {"done", done}, {"estimated_seconds", seconds}},
        text + " Nothing was trained.\n");
}

std::string lines_about(const std::vector<study::Failure>& failures) {
  std::string text;
  for (const study::Failure& failure : failures)
    text +=
        fmt::format("\n  {}: {}\n    log: {}", failure.name, failure.reason, failure.log.string());
  return text;
}

void fail_study(const study::Outcome& outcome, const std::string& page) {
  std::string text;
  if (!outcome.failures.empty())
    text += fmt::format("{} of {} runs failed; the same command tries them again.",
                        outcome.failures.size(), outcome.planned) +
            lines_about(outcome.failures);
  if (!outcome.task_failures.empty())
    text += fmt::format("{}{} evaluations of tasks failed; the same command tries them again.",
                        text.empty() ? "" : "\n  ", outcome.task_failures.size()) +
            lines_about(outcome.task_failures);
  if (!page.empty()) text += fmt::format("\n  The report of the other runs: {}", page);
  throw Error(text);
}

void run(const Options& options) {
  if (options.dry_run) return show_dry_run(options.study);
  const study::Outcome outcome = study::run_plan(options.study);
  report::Written written{.verdicts = Json::array()};
  if (outcome.done > 0) written = report::write_report(options.study.study);
  const std::string page = written.page.string();
  if (!outcome.failures.empty() || !outcome.task_failures.empty()) fail_study(outcome, page);
  Json document = {{"report", page},
                   {"runs", written.runs},
                   {"done_before", outcome.done_before},
                   {"verdicts", written.verdicts}};
  if (!written.tasks.is_null()) document["tasks"] = written.tasks;
  print(document,
        fmt::format("{} runs are done ({} were done before, {} of them elsewhere).\n{}Report: {}\n",
                    outcome.done, outcome.done_before, outcome.reused, written.summary, page));
}

void add(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      subcommand(app, "run",
                 "run a plan (models x budgets x seeds x settings) and write its report; "
                 "resumable at any point");
  command
      ->add_option("PLAN", options->study.plan,
                   "the plan: a TOML file, or a name (`assay list plans`)")
      ->required();
  command->add_option("-o,--output", options->study.study, "the study's folder")->required();
  command->add_option("--data", options->study.data, "token store, instead of the plan's");
  command->add_option("--reuse", options->study.reuse,
                      "folder with records of finished runs, or a study: "
                      "runs that are found there are not trained again");
  command->add_option("--set", options->study.set,
                      "override the plan: --set train.steps=100 --set 'seeds=[1]'");
  command->add_option("--jobs", options->study.jobs, "runs at a time (default: one per device)")
      ->check(CLI::Range(1, 1024));
  command
      ->add_option("--devices", options->study.devices,
                   "cpu, or cuda:0,cuda:1,...: the runs take turns on them")
      ->delimiter(',');
  command
      ->add_option("--threads", options->study.threads,
                   "CPU threads of each run (default: the cores are divided among the runs)")
      ->check(CLI::Range(1, 4096));
  command->add_flag("--dry-run", options->dry_run,
                    "print runs, parameters, FLOPs and time; train nothing");
  command->callback([=] {
    if (command->count("--jobs") == 0)
      options->study.jobs = std::max<int64_t>(1, int64_t(options->study.devices.size()));
    options->study.plan = study::plan_file(options->study.plan);
    run(*options);
  });
}

const bool registered = commands().add("run", add);

}  // namespace
}  // namespace assay::cli
