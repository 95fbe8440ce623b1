// assay run PLAN.toml -o STUDY
#include <nlohmann/json.hpp>

#include "base/program.h"
#include "base/progress.h"
#include "cli/command.h"
#include "report/report.h"
#include "report/table.h"
#include "study/process.h"
#include "study/runner.h"
#include "study/slurm.h"

namespace assay::cli {
namespace {

using Json = nlohmann::json;

struct Options {
  study::StudyOptions study;
  std::string launcher = "local";
  // texts of one or more words
  std::vector<std::string> sbatch;
  std::vector<std::string> sbatch_controller;
  bool no_wait = false;
  bool dry_run = false;
};

// With the figures that controls are matched by: parameters, and what a sequence of 102,400
// tokens leaves as state. FLOPs of training are three times those of the forward pass.
constexpr const char* kLine = "{:<32} {:>10} {:>14} {:>10} {:>14} {:>8} {:>9}\n";

std::string line(const study::ExpectedRun& run) {
  const run::Estimate& e = run.estimate;
  return fmt::format(kLine, run.name, Progress::count(double(e.parameters)),
                     report::show(double(e.state_bytes.at_long), report::Format::bytes),
                     Progress::count(double(e.tokens)),
                     fmt::format("{:.2e}", 3 * double(e.tokens) * e.flops_per_token), e.steps,
                     run.found.empty() ? Progress::duration(e.estimated_seconds) : "done");
}

// The words of all texts, which may contain quotes.
std::vector<std::string> words_of(const std::vector<std::string>& texts) {
  std::vector<std::string> words;
  for (const std::string& text : texts)
    for (std::string& word : CLI::detail::split_up(text)) words.push_back(std::move(word));
  return words;
}

study::SlurmOptions slurm_options(const Options& options) {
  study::SlurmOptions out{.sbatch = words_of(options.sbatch),
                          .controller = words_of(options.sbatch_controller),
                          .command = own_command_line(),
                          .wait = !options.no_wait};
  std::erase(out.command, "--dry-run");
  if (out.wait) out.command.push_back("--no-wait");
  return out;
}

// Preview of the first submission: the runs that choose learning rates, or all that are not done.
std::string slurm_preview(const study::StudyOptions& options,
                          const std::vector<study::ExpectedRun>& expected) {
  std::vector<study::PlannedRun> first;
  for (const study::ExpectedRun& run : expected)
    if (run.found.empty() && (first.empty() || run.purpose == first.front().purpose))
      first.push_back(run);
  if (first.empty()) return "No run is left to submit.\n";
  return study::SlurmLauncher(options).preview(first);
}

void show_dry_run(const study::StudyOptions& options) {
  std::string text = fmt::format(kLine, "run", "parameters", "state, 102,400", "tokens",
                                 "training FLOPs", "steps", "time");
  Json runs = Json::array();
  double seconds = 0;
  int64_t done = 0;
  const auto expected = study::dry_run(options);
  for (const study::ExpectedRun& run : expected) {
    text += line(run);
    Json row = to_json(run.estimate);
    row["name"] = run.name;
    row["key"] = run.key;
    row["config"] = run.toml;
    row["found"] = run.found;
    if (run.found.empty()) seconds += run.estimate.estimated_seconds;
    else ++done;
    runs.push_back(std::move(row));
  }
  text += fmt::format(
      "{} runs, {} of them done; {} for the others, one after another. "
      "The times leave out the start of each run and the tasks. "
      "Nothing was trained.\n",
      runs.size(), done, Progress::duration(seconds));
  Json document = {{"runs", runs}, {"done", done}, {"estimated_seconds", seconds}};
  if (options.slurm) {
    document["slurm"] = slurm_preview(options, expected);
    text += "\n" + document["slurm"].get<std::string>();
  }
  print(document, text);
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
  if (outcome.in_queue > 0)
    return print({{"runs", outcome.done}, {"in_queue", outcome.in_queue}},
                 fmt::format("{} of {} runs are done, and {} are in Slurm's queue.\n{}\n",
                             outcome.done, outcome.planned, outcome.in_queue,
                             "The same command shows the progress of the study."));
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
        fmt::format("Runs: {} done, {} of them before and {} elsewhere.\n{}Report: {}\n",
                    outcome.done, outcome.done_before, outcome.reused, written.summary, page));
}

void add(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      subcommand(app, "run",
                 "run a plan (models x budgets x seeds x settings) and write its report; "
                 "resumable at any point",
                 {"run mine.toml --data store -o study", "run demo --dry-run"});
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
  command
      ->add_option("--jobs", options->study.jobs,
                   "runs at a time (default: one per device; with Slurm: no limit)")
      ->check(in_range(1, 1024));
  command
      ->add_option("--devices", options->study.devices,
                   "cpu, or cuda:0,cuda:1,...: the runs take turns on them")
      ->delimiter(',');
  command
      ->add_option("--threads", options->study.threads,
                   "CPU threads of each run (default: the cores are divided among the runs)")
      ->check(in_range(1, 4096));
  command
      ->add_option("--launcher", options->launcher,
                   "local: processes of this machine; slurm: job arrays")
      ->check(CLI::IsMember({"local", "slurm"}))
      ->capture_default_str();
  command->add_option("--sbatch", options->sbatch,
                      "options of sbatch for the runs: --sbatch \"--partition=gpu --gpus=1\"");
  command->add_option("--sbatch-controller", options->sbatch_controller,
                      "options of sbatch for the controller jobs, which continue the study; "
                      "default: those of --sbatch");
  command->add_flag("--no-wait", options->no_wait,
                    "end when the jobs are submitted; they do not need this command");
  command->add_flag("--dry-run", options->dry_run,
                    "print runs, parameters, FLOPs and time; write nothing");
  command->callback([=] {
    if (options->launcher == "slurm") {
      options->study.slurm = slurm_options(*options);
      if (command->count("--jobs") > 0)
        options->study.slurm->tasks_at_a_time = std::exchange(options->study.jobs, 1);
    } else if (options->no_wait || !options->sbatch.empty() ||
               !options->sbatch_controller.empty()) {
      fail("--sbatch, --sbatch-controller and --no-wait need --launcher slurm");
    } else if (command->count("--jobs") == 0) {
      options->study.jobs = std::max<int64_t>(1, int64_t(options->study.devices.size()));
    }
    options->study.plan = study::plan_file(options->study.plan);
    run(*options);
  });
}

const bool registered = commands().add("run", add);

}  // namespace
}  // namespace assay::cli
