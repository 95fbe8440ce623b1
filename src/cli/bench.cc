// assay bench SUBJECT
#include "eval/bench.h"

#include <nlohmann/json.hpp>

#include "cli/bench_models.h"
#include "cli/command.h"
#include "train/device.h"

namespace assay::cli {
namespace {

using Json = nlohmann::json;

struct Options {
  eval::AttentionBench bench;
  std::string device = "auto";
  int threads = 0;
};

void run(const Options& o) {
  train::use_threads(o.threads);
  const c10::Device device = train::choose_device(o.device);
  Json found = eval::bench_attention(o.bench, device);
  found["device"] = train::device_name(device), found["batch"] = o.bench.batch, found["heads"] = o.bench.heads;
  found["head_dim"] = o.bench.head_dim, found["window"] = o.bench.window, found["chunk_size"] = o.bench.chunk_size;
  std::string text = fmt::format("{}, {}, B {}, H {}, D {}, window {}, chunk {}\n", found["device"].get<std::string>(),
                                 found["dtype"].get<std::string>(), o.bench.batch, o.bench.heads, o.bench.head_dim,
                                 o.bench.window, o.bench.chunk_size);
  for (const auto& [op, path] : found["paths"].items()) text += fmt::format("{}: {}\n", op, path.get<std::string>());
  text += fmt::format("{:>8}  {:<18} {:>12} {:>12} {:>14}\n", "T", "", "forward ms", "backward ms", "full / this");
  double full = 0;
  for (const Json& row : found["rows"]) {
    const double forward = row["forward"], backward = row["backward"];
    if (row["form"] == "full") full = forward + backward;
    text += fmt::format("{:>8}  {:<18} {:>12.3f} {:>12.3f} {:>14.2f}\n", row["time"].get<int64_t>(),
                        row["form"].get<std::string>(), 1e3 * forward, 1e3 * backward, full / (forward + backward));
  }
  print(found, text);
}

void add(CLI::App& app) {
  CLI::App* bench = app.add_subcommand("bench", "operators, or whole models, side by side on this machine");
  bench->require_subcommand(1);
  add_bench_models(*bench);
  auto o = std::make_shared<Options>();
  CLI::App* command =
      subcommand(*bench, "attention", "full, window and Top-1 Chunk attention, forward and backward, over the length");
  command->add_option("--lengths", o->bench.lengths, "of the sequence, T")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--batch", o->bench.batch, "sequences")->capture_default_str()->check(CLI::PositiveNumber);
  command->add_option("--heads", o->bench.heads, "heads of q, k and v")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--head-dim", o->bench.head_dim, "size of a head")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--window", o->bench.window, "positions that window attention sees")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--chunk-size", o->bench.chunk_size, "positions a chunk")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--seconds", o->bench.seconds, "spent on each length, at least")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  command->add_option("--device", o->device, "auto, cpu, cuda, cuda:N")->capture_default_str();
  command->add_option("--threads", o->threads, "CPU threads; 0: all")->check(CLI::Range(0, 4096));
  command->callback([o] { run(*o); });
}
const bool registered = commands().add("bench", add);

}  // namespace
}  // namespace assay::cli
