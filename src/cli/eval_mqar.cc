// assay eval mqar PLAN.toml -o DIR
#include <nlohmann/json.hpp>

#include "base/progress.h"
#include "cli/command.h"
#include "report/svg.h"
#include "report/table.h"
#include "run/folder.h"
#include "study/plan.h"
#include "tasks/mqar_runner.h"
#include "train/device.h"

namespace assay::cli {
namespace {

using Json = nlohmann::json;

struct Options {
  study::StudyOptions study;
  std::optional<size_t> run;
};

struct Best {
  const tasks::MqarRun* run = nullptr;
  Json result;
};
using BestOf = std::map<std::tuple<int64_t, int64_t, std::string, int64_t>,
                        Best>;  // length, pairs, model, width

// One run of the plan, as a process of run_mqar.
void train_one(const Options& o, const tasks::MqarStudy& study) {
  if (*o.run >= study.runs.size())
    fail("--run {}: the plan has {} runs, numbered from 0", *o.run, study.runs.size());
  const tasks::MqarRun& run = study.runs[*o.run];
  train::use_threads(int(o.study.threads));
  train::set_up_torch();
  const c10::Device device =
      train::choose_device(o.study.devices.empty() ? "auto" : o.study.devices.front());
  Progress progress(/*interval=*/0);
  Json accuracies = Json::array();
  const auto show = [&](int64_t epoch, double accuracy) {
    accuracies.push_back(accuracy);
    progress.show(fmt::format(
        "{}, width {}, length {}, learning rate {}: epoch {}/{}, accuracy {:.3f}", run.model,
        run.width, run.data.length, run.learning_rate, epoch, study.plan.epochs, accuracy));
  };
  const tasks::MqarResult found = tasks::train_mqar(run, study.plan, device, show);
  const Json result = {{"accuracy", found.accuracy},
                       {"accuracies", accuracies},
                       {"epochs", found.epochs},
                       {"state_bytes", found.state_bytes},
                       {"seconds", found.seconds},
                       {"parameters", found.parameters},
                       {"learning_rate", run.learning_rate}};
  print(result, result.dump() + "\n");
}

void write_figures(const fs::path& folder, const BestOf& best) {
  std::map<std::pair<int64_t, int64_t>, report::Figure> figures;
  for (const auto& [place, found] : best) {
    const auto& [length, pairs, model, width] = place;
    report::Figure& figure = figures[{length, pairs}];
    figure.id = fmt::format("mqar_{}_{}", length, pairs);
    figure.title = fmt::format("MQAR, {} tokens, {} pairs", length, pairs);
    figure.x = {.title = "state in bytes", .log = true};
    figure.y = {.title = "accuracy", .range = std::pair(0.0, 1.02)};
    auto series = std::ranges::find(figure.series, model, &report::Series::name);
    if (series == figure.series.end()) {
      figure.series.push_back({.name = model, .style = int(figure.series.size())});
      series = figure.series.end() - 1;
    }
    series->x.push_back(found.result["state_bytes"]);
    series->y.push_back(found.result["accuracy"]);
  }
  for (const auto& [place, figure] : figures)
    write_file(folder / (figure.id + ".svg"), report::to_svg(figure));
}

void fail_unless_complete(const tasks::MqarOutcome& outcome, const fs::path& folder,
                          size_t planned) {
  if (outcome.interrupted)
    fail<Interrupted>(
        "interrupted; {} has {} of {} runs, and the same command continues with the others",
        folder.string(), outcome.results.size(), planned);
  if (outcome.failures.empty()) return;
  std::string text = fmt::format("{} of {} runs failed; the same command tries them again.",
                                 outcome.failures.size(), planned);
  for (const study::Failure& failure : outcome.failures)
    text +=
        fmt::format("\n  {}: {}\n    log: {}", failure.name, failure.reason, failure.log.string());
  throw Error(text);
}

void run(const Options& o) {
  const tasks::MqarStudy study = tasks::MqarStudy::read(o.study.plan);
  if (o.run) return train_one(o, study);
  const fs::path& folder = o.study.study;
  run::check_output_folder(folder);
  make_folder(folder);
  const FolderLock lock(folder);
  const tasks::MqarOutcome outcome = tasks::run_mqar(study, o.study);
  BestOf best;
  Json all = Json::array();
  for (const auto& [number, found] : outcome.results) {
    const tasks::MqarRun& one = study.runs[number];
    Best& entry = best[{one.data.length, one.data.pairs, one.model, one.width}];
    if (!entry.run || found["accuracy"] > entry.result["accuracy"]) entry = {&one, found};
    Json result = found;
    result.update({{"model", one.model},
                   {"width", one.width},
                   {"length", one.data.length},
                   {"pairs", one.data.pairs}});
    all.push_back(result);
  }
  report::Table table{.id = "mqar",
                      .title = "MQAR",
                      .note = "",
                      .columns = {{"length"},
                                  {"pairs"},
                                  {"model"},
                                  {"width"},
                                  {"state", report::Format::bytes},
                                  {"accuracy", report::Format::loss},
                                  {"learning rate", report::Format::factor}}};
  for (const auto& [place, found] : best)
    table.rows.push_back(
        {std::to_string(std::get<0>(place)), std::to_string(std::get<1>(place)), std::get<2>(place),
         std::to_string(std::get<3>(place)), found.result["state_bytes"].get<double>(),
         found.result["accuracy"].get<double>(), found.result["learning_rate"].get<double>()});
  write_figures(folder, best);
  write_file(folder / "mqar.csv", report::to_csv(table));
  fail_unless_complete(outcome, folder, study.runs.size());
  print({{"runs", all}, {"folder", folder.string()}}, report::to_text(table));
}

void add(CLI::App& eval) {
  auto o = std::make_shared<Options>();
  CLI::App* command = subcommand(
      eval, "mqar", "train small models of every architecture on associative recall (MQAR)",
      {"eval mqar mqar/small -o results"});
  command
      ->add_option("PLAN", o->study.plan,
                   "TOML with [mqar] and [model.NAME], or the name of one, such as mqar/small")
      ->required();
  command
      ->add_option("-o,--output", o->study.study,
                   "folder of results and figures; finished runs in it are not run again")
      ->required();
  command
      ->add_option("--jobs", o->study.jobs,
                   "runs at a time, each a process (default: one per device)")
      ->check(in_range(1, 1024));
  command
      ->add_option("--device,--devices", o->study.devices,
                   "cpu, or cuda:0,cuda:1,...: the runs take turns on them; "
                   "default: cuda:0 if there is a GPU, else cpu")
      ->delimiter(',');
  command
      ->add_option("--threads", o->study.threads,
                   "CPU threads of each run (default: the cores are divided among the runs)")
      ->check(in_range(1, 4096));
  command->add_option("--run", o->run,
                      "internal: train only this run of the plan (the first is 0), "
                      "print its result, and store nothing");
  command->callback([=] {
    o->study.plan = study::plan_file(o->study.plan);
    if (command->count("--jobs") == 0)
      o->study.jobs = std::max<int64_t>(1, int64_t(o->study.devices.size()));
    run(*o);
  });
}
[[maybe_unused]] const bool registered = eval_commands().add("mqar", add);

}  // namespace
}  // namespace assay::cli
