// assay train MODEL.toml --data STORE -o RUN
#include <algorithm>
#include <thread>

#include "base/progress.h"
#include "cli/command.h"
#include "cli/local_ranks.h"
#include "study/plan.h"
#include "train/device.h"
#include "train/trainer.h"

namespace assay::cli {
namespace {

struct Options {
  std::string file;
  train::TrainOptions train;
  std::vector<std::string> set;
  int threads = 0;
  int64_t ranks = 0;
  int64_t gpus = 0;
  bool dry_run = false;
};

// Runs of earlier versions, and runs without held-out sets, have the training loss only.
std::string loss_of(const run::Outcome& outcome) {
  if (outcome.held_out_loss) return fmt::format("held-out loss {:.4f}", *outcome.held_out_loss);
  return fmt::format("training loss of the last step {:.4f}", outcome.final_loss);
}

// The number of ranks that this command starts; 0: none.
int64_t ranks_to_start(const Options& options, const train::RankPlace& place) {
  if (options.ranks > 0 && options.gpus > 0) fail("give --ranks or --gpus, and not both");
  const int64_t wanted = std::max(options.ranks, options.gpus);
  if (options.dry_run || wanted == 0) return 0;
  if (place.launched && place.size != wanted)
    fail("--ranks or --gpus is {}, but the environment says that this is one of {} ranks", wanted,
         place.size);
  const int64_t found = int64_t(train::gpu_names().size());
  if (options.gpus > found)
    fail("--gpus {}: this host has {} GPUs. Nothing was changed.", options.gpus, found);
  return place.launched ? 0 : wanted;
}

train::RunConfig read_config(const Options& options, int64_t ranks) {
  const auto presets = study::names_of_plans("models");
  std::string name = fs::path(options.file).filename().string();
  if (name.ends_with(".toml")) name.resize(name.size() - std::string_view(".toml").size());
  if (!fs::exists(options.file) && std::ranges::find(presets, name) != presets.end())
    fail("{}: no such file; the preset '{}' is {}. Nothing was changed.", options.file, name,
         study::preset_file(name).lexically_normal().string());
  ConfigNode file = ConfigNode::read_file(options.file);
  if (file.has("reference") || file.has("models") || file.has("ladder"))
    fail(
        "{0}: this is the plan of a study; `assay run {0} --data STORE -o STUDY` runs it. "
        "Nothing was changed.",
        options.file);
  for (const std::string& assignment : options.set) file.set(assignment);
  // A resumed run keeps its slices, whatever the number of ranks
  const auto earlier =
      options.train.resume ? train::train_config_of(options.train.run) : std::nullopt;
  const auto keep = [&](const std::string& key, int64_t value) {
    if (!file.child("train").has(key)) file.set(fmt::format("train.{}={}", key, value));
  };
  if (earlier) {
    keep("gradient_slices", std::max<int64_t>(1, earlier->gradient_slices));
    keep("context_slices", earlier->context_slices);
    if (earlier->warmup_steps != earlier->warmup_steps_of_fraction() &&
        earlier->warmup_steps == earlier->earlier_warmup_steps())
      keep("warmup_steps", earlier->warmup_steps);
  }
  return train::read_run_config(file, options.train.store, ranks);
}

void print_estimate(const train::RunConfig& config, const train::TrainOptions& options) {
  const run::Estimate e = train::describe_run(config, options);
  print(to_json(e),
        fmt::format(
            "{} parameters, {} forward FLOPs per token, {} steps of {} tokens, about {} on {}\n",
            Progress::count(double(e.parameters)), Progress::count(e.flops_per_token), e.steps,
            config.train.tokens_per_step(), Progress::duration(e.estimated_seconds), e.device));
}

void train_alone(const Options& options, const train::TrainOptions& train_options, int64_t ranks) {
  const run::Outcome outcome = train::train(read_config(options, ranks), train_options);
  if (train_options.ranks && !train_options.ranks->first()) return;
  print(to_json(outcome),
        fmt::format("{}: {} steps, {} tokens in {} ({} tokens/s), {}\n", options.train.run.string(),
                    outcome.steps, Progress::count(double(outcome.tokens)),
                    Progress::duration(outcome.seconds), Progress::count(outcome.tokens_per_second),
                    loss_of(outcome)));
}

// As one of several ranks. Every error ends the other ranks, too.
void train_as(const train::RankPlace& place, const Options& options) {
  train::Ranks ranks(place);
  train::TrainOptions train_options = options.train;
  train_options.ranks = &ranks;
  if (!ranks.first()) document_is_printed();  // rank 0 prints the one document of --json
  if (options.gpus > 0) train_options.device = "cuda";
  try {
    train_alone(options, train_options, place.size);
  } catch (const Interrupted&) {
    throw;  // all ranks stop after the same step
  } catch (const Error& error) {
    ranks.failed(error.what(), error.exit_code);
    throw;
  } catch (const std::exception& error) {
    ranks.failed(error.what(), kFailed);
    throw;
  }
}

void run(const Options& options) {
  const train::RankPlace place = train::place_from_environment();
  const int64_t start = ranks_to_start(options, place);
  if (start > 0) {
    read_config(options, start);  // reports what is wrong once
    run_local_ranks(start);
    return;
  }
  // Threads of ranks on one host share its cores
  const int cores = int(std::thread::hardware_concurrency());
  train::use_threads(options.threads > 0 || place.local_size == 1
                         ? options.threads
                         : std::max(1, cores / int(place.local_size)));
  if (options.dry_run)
    print_estimate(read_config(options, std::max({options.ranks, options.gpus, int64_t{1}})),
                   options.train);
  else if (place.launched) train_as(place, options);
  else train_alone(options, options.train, 1);
}

void add(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* command = subcommand(
      app, "train", "train one model on a token store; resumable bit for bit",
      {"train plans/models/smoke.toml --data store -o run",
       "train plans/models/mamba2.toml --data store -o run --set train.steps=200 --resume"});
  command
      ->add_option("model", o->file,
                   "TOML with [model] and [train], such as plans/models/smoke.toml")
      ->required();
  command
      ->add_option("--data", o->train.store,
                   "token store (`assay data prepare`, `assay data synth`)")
      ->required();
  command->add_option("-o,--output", o->train.run, "run folder")->required();
  command->add_option("--set", o->set,
                      "override a value: --set train.steps=100 --set model.d_model=128");
  command->add_option("--device", o->train.device, "auto, cpu, cuda, cuda:N")
      ->capture_default_str();
  command->add_option("--threads", o->threads, "CPU threads; 0: all")->check(in_range(0, 4096));
  command
      ->add_option("--ranks", o->ranks,
                   "processes on this host that share each batch or its sequences")
      ->check(in_range(1, 1024));
  command->add_option("--gpus", o->gpus, "the same with one GPU per process")
      ->check(in_range(1, 1024));
  command->add_flag("--resume", o->train.resume,
                    "continue from the newest checkpoint in the run folder");
  command->add_flag("--dry-run", o->dry_run,
                    "print parameters, FLOPs and estimated time; write nothing");
  command->callback([o] { run(*o); });
}
const bool registered = commands().add("train", add);

}  // namespace
}  // namespace assay::cli
