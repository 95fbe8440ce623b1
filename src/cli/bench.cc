// assay bench SUBJECT
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/files.h"
#include "base/json.h"
#include "base/version.h"
#include "bench/attention.h"
#include "cli/bench_models.h"
#include "cli/command.h"
#include "report/svg.h"
#include "train/device.h"

namespace assay::cli {
namespace {

using Json = nlohmann::json;

struct Options {
  bench::AttentionBench bench;
  std::string device = "auto";
  std::string compare;
  std::string svg;
  int threads = 0;
};

double total(const Json& row) {
  return row.contains("failure") ? NAN
                                 : row["forward"].get<double>() + row["backward"].get<double>();
}

bool is_row(const Json& row) {
  const auto number = [&](const char* key) { return row.contains(key) && row[key].is_number(); };
  const auto text = [&](const char* key) { return row.contains(key) && row[key].is_string(); };
  return row.is_object() && number("time") && text("form") &&
         (text("failure") || (number("forward") && number("backward")));
}

Json rows_of_file(const fs::path& file) {
  const Json theirs = parse_json(read_file(file), file.string());
  if (!theirs.is_object() || !theirs.contains("rows") ||
      !std::ranges::all_of(theirs["rows"], is_row))
    fail(
        "{}: expected {{\"rows\": [{{\"time\", \"form\", \"forward\", \"backward\"}}, …]}}, "
        "as --json prints. Nothing was timed.",
        file.string());
  return theirs["rows"];
}

// Lengths together, ours before theirs.
void join_rows(Json& ours, const Json& theirs) {
  for (const Json& row : theirs) ours.push_back(row);
  std::ranges::stable_sort(ours.get_ref<Json::array_t&>(), {},
                           [](const Json& row) { return row["time"].get<int64_t>(); });
}

std::string text_of(const Json& rows) {
  std::string text = fmt::format("{:>8}  {:<22} {:>12} {:>12} {:>20}\n", "T", "", "forward ms",
                                 "backward ms", "speed-up over full");
  std::map<int64_t, double> full;  // the fastest of them
  for (const Json& row : rows)
    if (row["form"].get<std::string>().starts_with("full") && !row.contains("failure")) {
      const double seconds = total(row);
      double& best = full.try_emplace(row["time"], seconds).first->second;
      best = std::min(best, seconds);
    }
  for (const Json& row : rows) {
    text +=
        fmt::format("{:>8}  {:<22} ", row["time"].get<int64_t>(), row["form"].get<std::string>());
    if (row.contains("failure")) {
      text += row["failure"].get<std::string>() + "\n";
      continue;
    }
    const auto best = full.find(row["time"]);
    text +=
        fmt::format("{:>12.3f} {:>12.3f} {:>20}\n", 1e3 * row["forward"].get<double>(),
                    1e3 * row["backward"].get<double>(),
                    best == full.end() ? "–" : fmt::format("{:.2f}", best->second / total(row)));
  }
  return text;
}

report::Figure figure_of(const Json& rows, const std::string& title) {
  report::Figure figure{
      "attention", title, {"positions, T", true}, {"forward + backward, ms", true}};
  figure.height = 480;
  for (const Json& row : rows) {
    const std::string form = row["form"];
    auto series = std::ranges::find(figure.series, form, &report::Series::name);
    if (series == figure.series.end())
      series = figure.series.insert(series, {.name = form, .style = int(figure.series.size())});
    series->x.push_back(row["time"]);
    series->y.push_back(1e3 * total(row));
  }
  return figure;
}

void run(const Options& o) {
  if (!o.svg.empty()) check_output(o.svg);
  train::use_threads(o.threads);
  train::set_up_torch();
  const c10::Device device = train::choose_device(o.device);
  const Json others = o.compare.empty() ? Json::array() : rows_of_file(o.compare);
  Json found = bench::bench_attention(o.bench, device);
  join_rows(found["rows"], others);
  found["assay"] = version() + " " + commit();
  found["torch"] = train::torch_version();
  found["date"] = now_utc();
  found["device"] = train::device_name(device);
  found["batch"] = o.bench.batch;
  found["heads"] = o.bench.heads;
  found["head_dim"] = o.bench.head_dim;
  found["window"] = o.bench.window;
  found["chunk_size"] = o.bench.chunk_size;
  const std::string shape = fmt::format(
      "{}, {}, B {}, H {}, D {}, window {}, chunk {}", found["device"].get<std::string>(),
      found["dtype"].get<std::string>(), o.bench.batch, o.bench.heads, o.bench.head_dim,
      o.bench.window, o.bench.chunk_size);
  if (!o.svg.empty()) write_file(o.svg, report::to_svg(figure_of(found["rows"], shape)));
  std::string text = shape + "\n";
  for (const auto& [op, path] : found["paths"].items())
    text += fmt::format("{}: {}\n", op, path.get<std::string>());
  print(found, text + text_of(found["rows"]));
}

void add(CLI::App& app) {
  CLI::App* bench =
      app.add_subcommand("bench", "compare operators or whole models on this machine");
  bench->require_subcommand(1);
  add_bench_models(*bench);
  auto o = std::make_shared<Options>();
  CLI::App* command =
      subcommand(*bench, "attention",
                 "time full, window and Top-1 attention, forward and backward, by sequence length",
                 {"bench attention --lengths 1024,8192"});
  command->add_option("--lengths", o->bench.lengths, "sequence lengths T, separated by commas")
      ->delimiter(',')
      ->capture_default_str()
      ->check(positive_number());
  command->add_option("--batch", o->bench.batch, "sequences per call")
      ->capture_default_str()
      ->check(positive_number());
  command->add_option("--heads", o->bench.heads, "heads of q, k and v")
      ->capture_default_str()
      ->check(positive_number());
  command->add_option("--head-dim", o->bench.head_dim, "size of a head")
      ->capture_default_str()
      ->check(positive_number());
  command->add_option("--window", o->bench.window, "positions that window attention sees")
      ->capture_default_str()
      ->check(positive_number());
  command->add_option("--chunk-size", o->bench.chunk_size, "positions per chunk")
      ->capture_default_str()
      ->check(positive_number());
  command->add_option("--seconds", o->bench.seconds, "shortest time spent on each length")
      ->capture_default_str()
      ->check(non_negative_number());
  command
      ->add_option("--limit", o->bench.limit,
                   "seconds; an implementation that takes longer is not timed at larger lengths")
      ->capture_default_str()
      ->check(positive_number());
  command
      ->add_option("--compare", o->compare,
                   "JSON file with the times of another program, such as bench/flex_attention.py")
      ->check(CLI::ExistingFile);
  command->add_option("--svg", o->svg, "write a figure of time over length (SVG) to this file");
  command->add_option("--device", o->device, "auto, cpu, cuda, cuda:N")->capture_default_str();
  command->add_option("--threads", o->threads, "CPU threads; 0: all")->check(in_range(0, 4096));
  command->callback([o] { run(*o); });
}
const bool registered = commands().add("bench", add);

}  // namespace
}  // namespace assay::cli
