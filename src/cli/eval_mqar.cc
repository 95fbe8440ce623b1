// assay eval mqar PLAN.toml -o DIR
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "base/progress.h"
#include "cli/command.h"
#include "report/svg.h"
#include "report/table.h"
#include "study/database.h"
#include "tasks/mqar.h"
#include "train/device.h"

namespace assay::cli {
namespace {

using Json = nlohmann::json;

struct Options {
  fs::path plan, output;
  std::string device = "auto";
  int threads = 0;
};

struct Best {
  const tasks::MqarRun* run = nullptr;
  Json result;
};
using BestOf = std::map<std::tuple<int64_t, int64_t, std::string, int64_t>,
                        Best>;  // length, pairs, model, width

// What decides the result of a run.
std::string key_of(const tasks::MqarRun& run, const tasks::MqarPlan& plan, c10::Device device) {
  return sha256(Json{run.toml, run.data.length, run.data.pairs, run.data.power,
                     run.data.random_non_queries, run.learning_rate, plan.train_examples,
                     plan.test_examples, plan.epochs, plan.batch_size, plan.seed, plan.weight_decay,
                     plan.stop_at, c10::toString(train::compute_dtype(plan.precision, device))}
                    .dump());
}

Json result_of(study::Database& database, const tasks::MqarStudy& study, const tasks::MqarRun& run,
               size_t number, c10::Device device, Progress& progress) {
  const std::string key = key_of(run, study.plan, device);
  const auto stored = database.query("SELECT result FROM runs WHERE key = ?", {key});
  if (!stored.empty()) return Json::parse(stored[0]["result"].get<std::string>());
  const auto show = [&](int64_t epoch, double accuracy) {
    progress.show(fmt::format(
        "run {}/{}: {} width {} length {} learning rate {}: epoch {}/{}, accuracy {:.3f}", number,
        study.runs.size(), run.model, run.width, run.data.length, run.learning_rate, epoch,
        study.plan.epochs, accuracy));
  };
  const tasks::MqarResult found = tasks::train_mqar(run, study.plan, device, show);
  const Json result = {{"accuracy", found.accuracy},       {"epochs", found.epochs},
                       {"state_bytes", found.state_bytes}, {"parameters", found.parameters},
                       {"seconds", found.seconds},         {"learning_rate", run.learning_rate}};
  database.query("INSERT INTO runs VALUES (?, ?)", {key, result.dump()});
  return result;
}

void write_figures(const Options& o, const BestOf& best) {
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
    write_file(o.output / (figure.id + ".svg"), report::to_svg(figure));
}

void run(const Options& o) {
  const tasks::MqarStudy study = tasks::MqarStudy::read(o.plan);
  if (o.threads > 0) at::set_num_threads(o.threads);
  train::set_up_torch();
  const c10::Device device = train::choose_device(o.device);
  make_folder(o.output);
  const FolderLock lock(o.output);
  study::Database database(o.output / "mqar.sqlite", study::Database::Mode::write);
  database.execute("CREATE TABLE IF NOT EXISTS runs (key TEXT PRIMARY KEY, result TEXT NOT NULL)");
  BestOf best;
  Json all = Json::array();
  try {
    Progress progress;
    for (size_t i = 0; i < study.runs.size(); ++i) {
      const tasks::MqarRun& one = study.runs[i];
      Best& entry = best[{one.data.length, one.data.pairs, one.model, one.width}];
      if (entry.run && entry.result["accuracy"] >= study.plan.stop_at) continue;
      Json result = result_of(database, study, one, i + 1, device, progress);
      if (!entry.run || result["accuracy"] > entry.result["accuracy"]) entry = {&one, result};
      result.update({{"model", one.model},
                     {"width", one.width},
                     {"length", one.data.length},
                     {"pairs", one.data.pairs}});
      all.push_back(result);
    }
  } catch (const Interrupted&) {
    fail<Interrupted>(
        "interrupted; {} has {} of {} runs, and the same command continues with the others",
        o.output.string(), all.size(), study.runs.size());
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
  write_figures(o, best);
  write_file(o.output / "mqar.csv", report::to_csv(table));
  print({{"runs", all}, {"folder", o.output.string()}}, report::to_text(table));
}

void add(CLI::App& eval) {
  auto o = std::make_shared<Options>();
  CLI::App* command = subcommand(
      eval, "mqar", "train small models of every architecture on associative recall (MQAR)");
  command
      ->add_option("PLAN", o->plan,
                   "TOML with [mqar] and [model.NAME], such as plans/mqar/small.toml")
      ->required();
  command
      ->add_option("-o,--output", o->output,
                   "folder of results and figures; finished runs in it are not run again")
      ->required();
  command->add_option("--device", o->device, "auto, cpu, cuda, cuda:N")->capture_default_str();
  command->add_option("--threads", o->threads, "CPU threads; 0: all")->check(in_range(0, 4096));
  command->callback([o] { run(*o); });
}
[[maybe_unused]] const bool registered = eval_commands().add("mqar", add);

}  // namespace
}  // namespace assay::cli
