// assay train MODEL.toml --data STORE -o RUN
#include <nlohmann/json.hpp>

#include "base/progress.h"
#include "cli/command.h"
#include "train/device.h"
#include "train/trainer.h"

namespace assay::cli {
namespace {

struct Options {
  std::string file;
  train::TrainOptions train;
  std::vector<std::string> set;
  int threads = 0;
  bool dry_run = false;
};

// Runs of earlier versions, and runs without held-out sets, have the training loss only.
std::string loss_of(const nlohmann::json& done) {
  const auto held_out = done.find("held_out_loss");
  if (held_out != done.end() && held_out->is_number())
    return fmt::format("held-out loss {:.4f}", held_out->get<double>());
  return fmt::format("training loss of the last step {:.4f}", done.at("final_loss").get<double>());
}

void run(const Options& options) {
  train::use_threads(options.threads);
  ConfigNode file = ConfigNode::read_file(options.file);
  for (const std::string& assignment : options.set) file.set(assignment);
  const train::RunConfig config = train::read_run_config(file, options.train.store);
  if (options.dry_run) {
    const nlohmann::json d = train::describe_run(config, options.train);
    print(d,
          fmt::format("{} parameters, {} FLOPs per token, {} steps of {} tokens, about {} on {}\n",
                      Progress::count(d["parameters"]), Progress::count(d["flops_per_token"]),
                      d["steps"].get<int64_t>(), config.train.tokens_per_step(),
                      Progress::duration(d["estimated_seconds"]), d["device"].get<std::string>()));
    return;
  }
  const nlohmann::json done = train::train(config, options.train);
  print(done, fmt::format("{}: {} steps, {} tokens in {} ({} tokens/s), {}\n",
                          options.train.run.string(), done["steps"].get<int64_t>(),
                          Progress::count(done["tokens"]), Progress::duration(done["seconds"]),
                          Progress::count(done["tokens_per_second"]), loss_of(done)));
}

void add(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* command =
      subcommand(app, "train", "one run: a model, a store, a folder; resumable bit for bit");
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
  command->add_option("--threads", o->threads, "CPU threads; 0: all")->check(CLI::Range(0, 4096));
  command->add_flag("--resume", o->train.resume,
                    "go on from the newest checkpoint in the run folder");
  command->add_flag("--dry-run", o->dry_run,
                    "parameters, FLOPs and estimated time; writes nothing");
  command->callback([o] { run(*o); });
}
const bool registered = commands().add("train", add);

}  // namespace
}  // namespace assay::cli
