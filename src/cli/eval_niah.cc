// assay eval niah MODEL… --variant 1 --lengths 1k,2k
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "base/interrupt.h"
#include "base/progress.h"
#include "cli/command.h"
#include "cli/model.h"
#include "report/heat_map.h"
#include "report/table.h"
#include "stats/items.h"
#include "tasks/evaluate.h"
#include "tasks/niah.h"

namespace assay::cli {
namespace {

using Json = nlohmann::json;

constexpr size_t kDepths = 10;  // rows of the heat map

struct Options {
  ModelOptions model;
  std::vector<std::string> models;
  std::vector<std::string> lengths;
  fs::path haystack;
  fs::path figures;
  tasks::NiahOptions niah;
  int64_t batch_tokens = 8192;
  bool bos = false;
};

struct Cell {
  int64_t length = 0;
  std::vector<tasks::NeedleSample> samples;
  std::vector<double> found;  // 0 or 1 for each sample
  std::vector<std::string> generated;
};

// "1k" is 1,024.
int64_t parse_length(const std::string& text) {
  size_t used = 0;
  int64_t value = 0;
  try {
    value = std::stoll(text, &used);
  } catch (const std::exception&) {  // reported below
  }
  const bool thousands = used + 1 == text.size() && (text[used] == 'k' || text[used] == 'K');
  if (value < 1 || value > (int64_t{1} << 30) || (used != text.size() && !thousands))
    fail("--lengths: '{}' is not a number of tokens, such as 1000 or 4k (4,096)", text);
  return thousands ? value * 1024 : value;
}

std::string haystack_of(const Options& o) {
  if (o.niah.variant == 1) return "";
  if (o.haystack.empty())
    fail("variants 2 and 3 need a text to hide the needle in: --haystack FILE");
  return tasks::read_haystack(o.haystack);
}

Cell answer(const Options& o, const TrainedModel& trained, int64_t length, Progress& progress) {
  tasks::NiahOptions niah = o.niah;
  niah.length = length;
  tasks::Encoder encoder(trained.need_tokenizer(), o.bos, tasks::Encoder::Prefix::bos);
  Cell cell{
      length,
      tasks::needle_samples(
          niah, [&](const std::string& text) { return int64_t(encoder.encode(text).size()); }),
      {},
      {}};
  std::vector<std::vector<int64_t>> prompts;
  for (const tasks::NeedleSample& sample : cell.samples)
    prompts.push_back(encoder.encode(sample.prompt));
  cell.found.resize(prompts.size());
  cell.generated.resize(prompts.size());
  tasks::Scorer scorer(*trained.model, {.batch_tokens = o.batch_tokens});
  size_t done = 0;
  // A text that holds an answer keeps it, so generation may end there.
  const auto ended = [&](size_t i, const std::vector<int64_t>& tokens) {
    return tokens.back() == encoder.separator() ||
           tasks::needle_score(encoder.decode(tokens), cell.samples[i].answer) > 0;
  };
  scorer.generate(prompts, niah.reserved, ended, [&](size_t i, const std::vector<int64_t>& tokens) {
    cell.generated[i] = encoder.decode(tokens);
    cell.found[i] = tasks::needle_score(cell.generated[i], cell.samples[i].answer);
    progress.show(
        fmt::format("{}: {} tokens: {}/{} samples", trained.path, length, ++done, prompts.size()));
  });
  return cell;
}

size_t row_of(double depth) { return std::min(kDepths - 1, size_t(depth * double(kDepths))); }

// Found needles by depth; NaN where no sample has this depth.
std::vector<double> by_depth(const Cell& cell) {
  std::vector<double> sums(kDepths);
  std::vector<double> counts(kDepths);
  for (size_t i = 0; i < cell.samples.size(); ++i) {
    sums[row_of(cell.samples[i].depth)] += cell.found[i];
    ++counts[row_of(cell.samples[i].depth)];
  }
  for (size_t row = 0; row < kDepths; ++row)
    sums[row] = counts[row] > 0 ? sums[row] / counts[row] : NAN;
  return sums;
}

stats::Interval share(const Cell& cell) {
  double found = 0;
  for (const double one : cell.found) found += one;
  return stats::share_interval(found, double(cell.found.size()), 0.95);
}

Json to_json(const Cell& cell) {
  Json samples = Json::array();
  for (size_t i = 0; i < cell.samples.size(); ++i)
    samples.push_back({{"depth", cell.samples[i].depth},
                       {"tokens", cell.samples[i].tokens},
                       {"answer", cell.samples[i].answer},
                       {"generated", cell.generated[i]},
                       {"correct", cell.found[i]}});
  const stats::Interval found = share(cell);
  return {{"length", cell.length},      {"haystack_units", cell.samples.front().units},
          {"score", found.estimate},    {"interval", {found.low, found.high}},
          {"by_depth", by_depth(cell)}, {"samples", samples}};
}

fs::path figure_file(const Options& o, size_t index) {
  return o.figures / fmt::format("niah_{}_{}.svg", o.niah.variant, index + 1);
}

void write_figure(const Options& o, const std::string& model, size_t index,
                  const std::vector<Cell>& cells) {
  report::HeatMap map{fmt::format("S-NIAH-{}, {}", o.niah.variant, model),
                      "length in tokens",
                      "depth of the needle",
                      {},
                      {},
                      std::vector<std::vector<double>>(kDepths)};
  for (size_t row = 0; row < kDepths; ++row)
    map.y.push_back(fmt::format("{}–{} %", 10 * row, 10 * row + 10));
  for (const Cell& cell : cells) {
    map.x.push_back(std::to_string(cell.length));
    const std::vector<double> column = by_depth(cell);
    for (size_t row = 0; row < kDepths; ++row) map.values[row].push_back(column[row]);
  }
  write_file(figure_file(o, index), report::to_svg(map));
}

void run(Options o) {
  if (o.niah.variant < 1 || o.niah.variant > 3)
    fail("--variant {}: there are 1, 2 and 3", o.niah.variant);
  std::vector<int64_t> lengths;
  for (const std::string& text : o.lengths) lengths.push_back(parse_length(text));
  o.niah.haystack = haystack_of(o);
  if (!o.figures.empty()) {
    make_folder(o.figures);
    for (size_t i = 0; i < o.models.size(); ++i) check_output(figure_file(o, i));
  }
  report::Table table{
      .id = "niah",
      .title = "S-NIAH",
      .note = "",
      .columns = {
          {"model"}, {"length"}, {"found with 95 % interval", report::Format::loss}, {"samples"}}};
  Json models = Json::array();
  {
    Progress progress;
    for (size_t i = 0; i < o.models.size(); ++i) {
      ModelOptions options = o.model;
      options.model = o.models[i];
      const TrainedModel trained(options);
      std::vector<Cell> cells;
      Json cells_json = Json::array();
      Json left_out = Json::array();
      for (const int64_t length : lengths) {
        if (length > trained.model->max_time()) {
          progress.log(fmt::format(
              "{}: {} tokens are left out, because the model can read {} tokens at most",
              o.models[i], length, trained.model->max_time()));
          left_out.push_back(length);
          continue;
        }
        cells.push_back(answer(o, trained, length, progress));
        cells_json.push_back(to_json(cells.back()));
        table.rows.push_back({o.models[i], std::to_string(length), share(cells.back()),
                              std::to_string(cells.back().found.size())});
      }
      if (!o.figures.empty() && !cells.empty()) write_figure(o, o.models[i], i, cells);
      models.push_back({{"model", o.models[i]}, {"cells", cells_json}, {"left_out", left_out}});
    }
  }
  if (table.rows.empty()) fail("no model can read any of the lengths; nothing was measured");
  print({{"variant", o.niah.variant}, {"models", models}}, report::to_text(table));
}

void add(CLI::App& eval) {
  auto o = std::make_shared<Options>();
  CLI::App* command =
      subcommand(eval, "niah", "measure passkey retrieval: S-NIAH-1, -2 and -3 of RULER",
                 {"eval niah run --lengths 256,512"});
  command
      ->add_option("MODEL", o->models, "runs, checkpoints, imported models or Hugging Face folders")
      ->required();
  command
      ->add_option("--variant", o->niah.variant,
                   "1: numbers in repeated lines; 2: numbers in a text; 3: UUIDs in a text")
      ->capture_default_str();
  command
      ->add_option("--lengths", o->lengths,
                   "tokens of prompt and answer together, such as 1k,2k,4000")
      ->required()
      ->delimiter(',');
  command->add_option(
      "--haystack", o->haystack,
      "text of variants 2 and 3: a text file, or the first document of a JSON Lines file");
  command
      ->add_option("--samples", o->niah.samples,
                   "needles per length, spread evenly over the depths")
      ->capture_default_str()
      ->check(positive_number());
  command
      ->add_option("--max-tokens", o->niah.reserved,
                   "tokens of an answer; they are part of the length")
      ->capture_default_str()
      ->check(positive_number());
  command->add_option("--seed", o->niah.seed, "seed of keys and values")->capture_default_str();
  command->add_option("--figures", o->figures, "folder for a heat map of each model, SVG");
  command
      ->add_option("--batch-tokens", o->batch_tokens,
                   "tokens per batch; lower it if memory runs out")
      ->capture_default_str()
      ->check(positive_number());
  command->add_flag("--bos", o->bos, "every prompt begins with the tokenizer's bos");
  add_device_options(*command, o->model);
  command->callback([o] { run(*o); });
}
[[maybe_unused]] const bool registered = eval_commands().add("niah", add);

}  // namespace
}  // namespace assay::cli
