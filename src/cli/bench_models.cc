// assay bench models [MODEL…]
#include "cli/bench_models.h"

#include <cmath>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/files.h"
#include "base/interrupt.h"
#include "base/program.h"
#include "base/version.h"
#include "bench/models.h"
#include "bench/processes.h"
#include "cli/command.h"
#include "nn/language_model.h"
#include "report/table.h"
#include "study/plan.h"
#include "train/device.h"

namespace assay::cli {
namespace {

using Json = nlohmann::json;

struct Options {
  std::vector<std::string> models;
  bench::ModelBench bench;
  std::string device = "auto";
  std::string reference;
  std::string csv;
  std::string compare;
  int threads = 0;
  int64_t profile = 0;
};

// Repeated calls on one GPU differ by less.
constexpr double kSlower = 0.02;

// The [model] of a preset or, when the name ends in .toml, of a file.
ConfigNode model_table(const std::string& name) {
  const fs::path path = name.ends_with(".toml") ? fs::path(name) : study::preset_file(name);
  const ConfigNode file = ConfigNode::read_file(path);
  file.read(Fields{}, {"model", "train"});
  if (!file.has("model")) fail("{}: there is no table [model]. Nothing was measured.", name);
  return file.child("model");
}

Json row_of(const std::string& name, const Options& o, c10::Device device) {
  Json row = bench::bench_model(model_table(name), o.bench, device);
  row["model"] = name;
  return row;
}

// The options again, for the process of one model.
std::vector<std::string> arguments(const Options& o) {
  std::vector<std::string> out = {"--device", o.device, "--precision", o.bench.precision};
  const auto add = [&](const char* name, auto value) {
    out.insert(out.end(), {name, fmt::format("{}", value)});
  };
  add("--batch", o.bench.batch);
  add("--time", o.bench.time);
  add("--vocab", o.bench.vocabulary);
  add("--steps", o.bench.steps);
  add("--largest", o.bench.largest);
  add("--threads", o.threads);
  add("--state-at", fmt::format("{}", fmt::join(o.bench.state_lengths, ",")));
  add("--full-attention", o.bench.full_attention);
  add("--decode", o.bench.decode);
  add("--prompt", o.bench.prompt);
  add("--generate", o.bench.generate);
  if (o.bench.recompute_activations) out.push_back("--recompute");
  if (o.profile > 0) add("--profile", o.profile);
  return out;
}

double number(const Json& value) { return value.is_number() ? value.get<double>() : NAN; }
double state_of(const Json& row, int64_t length) {
  const Json bytes = row.value("state_bytes", Json::object());
  return number(bytes.value(std::to_string(length), Json()));
}

// With several models, the figures that a control must match are followed by their ratio to the
// reference's. On a screen these columns are called "×"; in a file every column has its own name.
report::Table table_of(const Json& rows, const Json& reference, const Options& o, bool for_file) {
  using report::Format;
  report::Table table{"models", "", "", {{"model"}}, {}, true};
  const auto column = [&](const std::string& name, Format format) {
    table.columns.push_back({name, format});
  };
  const bool ratios = rows.size() > 1;
  const auto with_ratio = [&](const std::string& name, Format format) {
    column(name, format);
    if (ratios) column(for_file ? name + " ×" : "×", Format::factor);
  };
  with_ratio("parameters", Format::count);
  for (const int64_t length : o.bench.state_lengths)
    with_ratio(fmt::format("state at {}", length), Format::bytes);
  with_ratio("forward FLOPs/token", Format::count);
  with_ratio("tokens/s", Format::count);
  column("memory", Format::bytes);
  if (o.bench.prompt > 0) {
    column("prompts, s", Format::factor);
    column("prompt tokens/s", Format::count);
    column("generation, s", Format::factor);
    column("generated tokens/s", Format::count);
    column("both, s", Format::factor);
  } else if (o.bench.decode > 0) {
    column("decoding step, µs", Format::count);
    column("its bytes moved, µs", Format::count);
    column("generated token, µs", Format::count);
  }
  column(for_file ? "failure" : "", Format::text);
  for (const Json& row : rows) {
    std::vector<report::Cell> cells = {row["model"].get<std::string>()};
    const auto compared = [&](double mine, double theirs) {
      cells.push_back(mine);
      if (ratios) cells.push_back(mine / theirs);
    };
    const auto field = [&](const char* key) {
      compared(number(row.value(key, Json())), number(reference.value(key, Json())));
    };
    field("parameters");
    for (const int64_t length : o.bench.state_lengths)
      compared(state_of(row, length), state_of(reference, length));
    field("flops_per_token");
    field("tokens_per_second");
    cells.push_back(number(row.value("peak_memory_bytes", Json())));
    if (o.bench.prompt > 0) {
      const Json generation = row.value("generation", Json::object());
      for (const char* key : {"prompt_seconds", "prompt_tokens_per_second", "seconds",
                              "tokens_per_second", "total_seconds"})
        cells.push_back(number(generation.value(key, Json())));
    } else if (o.bench.decode > 0) {
      const Json decode = row.value("decode", Json::object());
      const auto of = [&](const char* key) { return number(decode.value(key, Json())); };
      cells.insert(cells.end(), {1e6 * of("seconds"), 1e6 * of("bytes") / of("bytes_per_second"),
                                 1e6 * of("seconds_per_token")});
    }
    cells.push_back(row.value("failure", std::string()));
    table.rows.push_back(std::move(cells));
  }
  return table;
}

// One paragraph per implementation, with the operators that use it.
std::string operators_of(const Json& rows) {
  std::map<std::string, std::set<std::string>> users;
  for (const Json& row : rows) {
    const Json operators = row.value("operators", Json::object());
    for (const auto& [op, path] : operators.items()) users[path.get<std::string>()].insert(op);
  }
  std::string text;
  for (const auto& [path, names] : users)
    text += fmt::format("  {}\n{}", path, wrapped({names.begin(), names.end()}, 4));
  return text;
}

std::string dtype_name(at::ScalarType type) {
  if (type == at::kBFloat16) return "bfloat16";
  return type == at::kDouble ? "float64" : "float32";
}

// The parts of a model's step that take longest, a line each.
std::string profile_of(const Json& row, int64_t lines) {
  const Json parts = row.value("profile", Json::array());
  double total = 0;
  for (const Json& part : parts) total += part["seconds"].get<double>();
  std::string text =
      fmt::format("{}, a step: {:.2f} ms\n", row["model"].get<std::string>(), 1e3 * total);
  for (const Json& part : parts) {
    if (lines-- == 0) break;
    const double seconds = part["seconds"];
    const std::string op = part["op"];
    const std::string kernel = part["kernel"];
    text += fmt::format("  {:9.3f} ms {:5.1f} %  × {:<5} {}{}{:.100}\n", 1e3 * seconds,
                        100 * seconds / total, part["calls"].get<int64_t>(), op,
                        op.empty() || kernel.empty() ? "" : ": ", kernel);
  }
  return text;
}

// Tokens per second of each model in a document that --json printed, which must describe the same
// device and step as `now`.
std::map<std::string, double> earlier_speeds(const std::string& file, const Json& now) {
  const Json earlier = parse_json(read_file(file), file);
  if (!earlier.is_object() || !earlier.value("rows", Json()).is_array())
    fail("{}: this is no document of `assay bench models --json`. Nothing was measured.", file);
  for (const auto& [key, value] : now.items())
    if (earlier.value(key, Json()) != value)
      fail("{}: its {} is {}, and here it is {}. Nothing was measured.", file, key,
           earlier.value(key, Json()).dump(), value.dump());
  std::map<std::string, double> speeds;
  for (const Json& row : earlier["rows"])
    if (const double speed = number(row.value("tokens_per_second", Json())); speed > 0)
      speeds[row.value("model", "")] = speed;
  return speeds;
}

struct Changes {
  std::string text;  // a line for each model that both have
  std::string slower;
};

Changes changes_of(const Json& rows, const std::map<std::string, double>& earlier) {
  Changes changes;
  for (const Json& row : rows) {
    const std::string name = row["model"];
    const auto found = earlier.find(name);
    const double speed = number(row.value("tokens_per_second", Json()));
    if (found == earlier.end() || std::isnan(speed)) continue;
    const double change = speed / found->second - 1;
    changes.text += fmt::format("  {:<28} {:+.1f} %\n", name, 100 * change);
    if (change < -kSlower)
      changes.slower +=
          fmt::format("{}{} ({:+.1f} %)", changes.slower.empty() ? "" : ", ", name, 100 * change);
  }
  return changes;
}

std::string reference_of(const Options& o) {
  if (!o.reference.empty()) return o.reference;
  return std::ranges::count(o.models, "transformer++") ? "transformer++" : o.models.front();
}

void run(Options o) {
  if (o.models.empty()) o.models = study::names_of_plans("models");
  if (o.models.empty())
    fail("no presets were found in plans/models; name files: assay bench models my.toml");
  if (o.bench.prompt > 0 && o.bench.decode == 0)
    fail("--prompt needs --decode, the number of sequences that read one. Nothing was measured.");
  // Before the first is measured
  if (!o.csv.empty()) check_output(o.csv);
  for (const std::string& model : o.models) nn::ModelSpec::read(model_table(model));
  const std::string reference = reference_of(o);
  if (!std::ranges::count(o.models, reference))
    fail("--reference '{}' is not among the models{}", reference,
         did_you_mean(reference, o.models));
  train::use_threads(o.threads);
  o.bench.profile = o.profile > 0;
  train::set_up_torch();
  const c10::Device device = train::choose_device(o.device);
  const std::string dtype = dtype_name(train::compute_dtype(o.bench.precision, device));
  Json document = {{"device", train::device_name(device)},
                   {"batch", o.bench.batch},
                   {"time", o.bench.time},
                   {"precision", dtype}};
  if (const char* target = std::getenv("ASSAY_CUDA_TARGET"); target && device.is_cuda())
    document["kernels"] = target;
  std::map<std::string, double> earlier;
  if (!o.compare.empty()) earlier = earlier_speeds(o.compare, document);
  const Json rows = o.models.size() == 1 ? Json::array({row_of(o.models[0], o, device)})
                                         : bench::model_rows(own_program(), o.models, arguments(o));
  const Json& base =
      *std::ranges::find(rows, Json(reference), [](const Json& row) { return row["model"]; });
  const auto table = [&](bool for_file) { return table_of(rows, base, o, for_file); };
  if (!o.csv.empty()) write_file(o.csv, report::to_csv(table(true)));
  std::string profiles;
  for (const Json& row : rows)
    if (o.profile > 0 && row.contains("profile")) profiles += profile_of(row, o.profile);
  document["assay"] = version() + " " + commit();
  document["torch"] = train::torch_version();
  document["date"] = now_utc();
  document["reference"] = reference;
  document["rows"] = rows;
  const Changes changes = changes_of(rows, earlier);
  print(document,
        fmt::format("{}, {}, B {}, T {}{}\n{}{}{}operators\n{}{}", train::device_name(device),
                    dtype, o.bench.batch, o.bench.time, rows.size() > 1 ? "; × " + reference : "",
                    report::to_text(table(false)),
                    changes.text.empty() ? "" : "tokens/s, compared with " + o.compare + "\n",
                    changes.text, operators_of(rows), profiles));
  document_is_printed();
  check_interrupt();
  if (!changes.slower.empty())
    fail<Error>("slower than in {} by more than {:.0f} %: {}", o.compare, 100 * kSlower,
                changes.slower);
}

}  // namespace

void add_bench_models(CLI::App& bench) {
  auto o = std::make_shared<Options>();
  CLI::App* command = subcommand(
      bench, "models",
      "compare models: parameters, state, FLOPs, training speed and operator implementations",
      {"bench models transformer++ mamba2 --steps 0"});
  command->add_option("MODEL", o->models,
                      "presets (assay list models) or files (mine.toml); "
                      "default: all presets, which takes minutes");
  command->add_option(
      "--reference", o->reference,
      "model that the × columns compare with; default: transformer++, else the first");
  const auto count = [&](const char* name, int64_t& value, const char* what) {
    command->add_option(name, value, what)->capture_default_str()->check(positive_number());
  };
  count("--batch", o->bench.batch, "sequences per step");
  count("--time", o->bench.time, "tokens per sequence, T");
  count("--vocab", o->bench.vocabulary, "vocabulary of models that do not set one");
  count("--largest", o->bench.largest,
        "largest number of parameters that is timed; larger models are only counted");
  command
      ->add_option("--steps", o->bench.steps,
                   "timed training steps, after one warm-up step; 0: count only")
      ->capture_default_str()
      ->check(non_negative_number());
  command
      ->add_option("--decode", o->bench.decode,
                   "batch size of a decode step that is also timed; 0: none")
      ->capture_default_str()
      ->check(non_negative_number());
  command
      ->add_option("--prompt", o->bench.prompt,
                   "with --decode: tokens of the prompt that each sequence reads; 0: none")
      ->capture_default_str()
      ->check(non_negative_number());
  command
      ->add_option("--generate", o->bench.generate,
                   "with --prompt: tokens that each sequence generates")
      ->capture_default_str()
      ->check(in_range(2, 1 << 30));
  command
      ->add_option("--state-at", o->bench.state_lengths,
                   "tokens after which the state is counted, separated by commas")
      ->delimiter(',')
      ->capture_default_str()
      ->check(positive_number());
  command
      ->add_option("--precision", o->bench.precision,
                   "auto (bf16 on CUDA, else fp32), bf16, fp32 or fp64")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "bf16", "fp32", "fp64"}));
  command
      ->add_option("--full-attention", o->bench.full_attention,
                   "kernel of full attention on CUDA: the deterministic one of training, "
                   "the one that torch chooses, cuDNN's or FlashAttention-2's")
      ->capture_default_str()
      ->check(CLI::IsMember({"deterministic", "torch", "cudnn", "flash-2"}));
  command
      ->add_option("--profile", o->profile,
                   "lines of a profile of one more training step; with --steps 0: of a decode step")
      ->capture_default_str()
      ->check(non_negative_number());
  command->add_flag("--recompute", o->bench.recompute_activations, "activation checkpointing");
  command->add_option("--csv", o->csv, "write the table with all digits to this CSV file");
  command->add_option("--compare", o->compare,
                      "earlier document of --json; exit code 1 if a model is more than 2 % slower");
  command->add_option("--device", o->device, "auto, cpu, cuda, cuda:N")->capture_default_str();
  command->add_option("--threads", o->threads, "CPU threads; 0: all")->check(in_range(0, 4096));
  command->callback([o] { run(*o); });
}

}  // namespace assay::cli
