// assay eval extrapolation MODEL… --data STORE --set DOMAIN.SPLIT
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "base/progress.h"
#include "cli/command.h"
#include "cli/model.h"
#include "data/token_store.h"
#include "eval/extrapolation.h"
#include "eval/probes.h"
#include "report/svg.h"
#include "report/table.h"
#include "stats/items.h"
#include "train/config.h"

namespace assay::cli {
namespace {

using Json = nlohmann::json;

struct Options {
  ModelOptions model;
  std::vector<std::string> models;
  std::string data;
  std::string set;
  fs::path figure;
  int64_t factor = 16;
  int64_t training_length = 0;
  int64_t sequences = 16;
  int64_t at_once = 4;
};

int64_t training_length(const Options& o, const std::string& model) {
  if (o.training_length > 0) return o.training_length;
  if (const auto config = train::train_config_of(model)) return config->sequence_length;
  fail("{}: its training length is not known; give it with --train-length", model);
}

std::vector<eval::PositionBin> measure(const Options& o, const TrainedModel& trained,
                                       const at::Tensor& tokens, int64_t length,
                                       Progress& progress) {
  const int64_t most = trained.model->max_time();
  const at::Tensor read =
      tokens.slice(1, 0, std::min<int64_t>(tokens.size(1), most == INT64_MAX ? most : most + 1));
  std::vector<at::Tensor> losses;
  for (int64_t begin = 0; begin < read.size(0); begin += o.at_once) {
    progress.show(fmt::format("{}: {}/{} texts of {} tokens", trained.path, begin, read.size(0),
                              read.size(1)));
    losses.push_back(
        eval::losses_by_position(*trained.model, read.slice(0, begin, begin + o.at_once)));
  }
  return eval::bin_positions(at::cat(losses), length);
}

// How many texts were read, and why there are fewer, or shorter ones, than were asked for.
std::string describe_texts(const Options& o, const std::string& model, const at::Tensor& tokens,
                           int64_t wanted) {
  std::string text = fmt::format("{}: read the first {} tokens of {} of {}.", model, tokens.size(1),
                                 counted(tokens.size(0), "text"), o.set);
  if (tokens.size(0) < o.sequences || tokens.size(1) < wanted)
    text += fmt::format(" {} tokens of {} were asked for.", wanted, counted(o.sequences, "text"));
  if (tokens.size(0) == 1) text += " One text gives no interval.";
  return text + "\n";
}

void run(const Options& o) {
  if (!o.figure.empty()) check_output(o.figure);
  const data::TokenStore store(o.data);
  report::Table table{.id = "extrapolation",
                      .title = "Loss by position",
                      .note = "",
                      .columns = {{"model"},
                                  {"positions"},
                                  {"of the training length"},
                                  {"loss with 95 % interval", report::Format::loss}}};
  report::Figure figure{.id = "extrapolation", .title = "Loss by position, " + o.set};
  figure.x = {.title = "position / training length", .log = true};
  figure.y = {.title = "nats per token"};
  Json models = Json::array();
  std::string texts;
  {
    Progress progress;
    for (const std::string& name : o.models) {
      ModelOptions options = o.model;
      options.model = name;
      const TrainedModel trained(options);
      trained.check_store(store);
      const int64_t length = training_length(o, name);
      const at::Tensor tokens =
          eval::probe_tokens(store, o.set, o.factor * length + 1, o.sequences);
      if (tokens.size(1) <= length)
        progress.log(fmt::format(
            "{}: the texts have {} tokens, no more than the training; nothing is extrapolated",
            o.set, tokens.size(1)));
      texts += describe_texts(o, name, tokens, o.factor * length + 1);
      report::Series series{.name = name, .style = int(figure.series.size())};
      Json bins = Json::array();
      for (const eval::PositionBin& bin : measure(o, trained, tokens, length, progress)) {
        const stats::Interval loss = stats::mean_interval(bin.losses, 0.95);
        if (!std::isfinite(loss.estimate))
          fail<Error>("{}: the loss at positions {} to {} is {}. Nothing was written.", name,
                      bin.first, bin.last - 1, loss.estimate);
        const double middle = double(bin.first + bin.last) / 2 / double(length);
        bins.push_back({{"first", bin.first},
                        {"last", bin.last},
                        {"loss", loss.estimate},
                        {"interval", {loss.low, loss.high}},
                        {"losses", bin.losses}});
        table.rows.push_back({name, fmt::format("{}–{}", bin.first, bin.last - 1),
                              fmt::format("{:.2f} ×", middle), loss});
        series.x.push_back(middle);
        series.y.push_back(loss.estimate);
        series.low.push_back(loss.low);
        series.high.push_back(loss.high);
      }
      series.upright = true;
      figure.series.push_back(series);
      models.push_back({{"model", name},
                        {"training_length", length},
                        {"texts", tokens.size(0)},
                        {"tokens", tokens.size(1)},
                        {"bins", bins}});
    }
  }
  figure.vertical = 1;
  if (!o.figure.empty()) write_file(o.figure, report::to_svg(figure));
  print({{"set", o.set}, {"models", models}}, report::to_text(table) + texts);
}

void add(CLI::App& eval) {
  auto o = std::make_shared<Options>();
  CLI::App* command =
      subcommand(eval, "extrapolation", "measure the loss by position, past the training length",
                 {"eval extrapolation run --data store --set web.test"});
  command
      ->add_option("MODEL", o->models, "runs, checkpoints, imported models or Hugging Face folders")
      ->required();
  command->add_option("--data", o->data, "token store")->required();
  command->add_option("--set", o->set, "DOMAIN.SPLIT, whose longest texts are read")->required();
  command
      ->add_option("--factor", o->factor, "longest position, as a multiple of the training length")
      ->capture_default_str()
      ->check(in_range(1, 1 << 20));
  command
      ->add_option("--train-length", o->training_length,
                   "training length; default: the run's sequence_length")
      ->check(in_range(1, 1 << 30));
  command->add_option("--sequences", o->sequences, "number of texts, the longest of the set")
      ->capture_default_str()
      ->check(positive_number());
  command->add_option("--at-once", o->at_once, "texts in one batch")
      ->capture_default_str()
      ->check(positive_number());
  command->add_option("--figure", o->figure, "SVG file");
  add_device_options(*command, o->model);
  command->callback([o] { run(*o); });
}
[[maybe_unused]] const bool registered = eval_commands().add("extrapolation", add);

}  // namespace
}  // namespace assay::cli
