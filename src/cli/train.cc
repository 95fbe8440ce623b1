// assay train MODEL.toml --data STORE -o RUN
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
std::string loss_of(const run::Outcome& outcome) {
  if (outcome.held_out_loss) return fmt::format("held-out loss {:.4f}", *outcome.held_out_loss);
  return fmt::format("training loss of the last step {:.4f}", outcome.final_loss);
}

void run(const Options& options) {
  train::use_threads(options.threads);
  ConfigNode file = ConfigNode::read_file(options.file);
  for (const std::string& assignment : options.set) file.set(assignment);
  const train::RunConfig config = train::read_run_config(file, options.train.store);
  if (options.dry_run) {
    const run::Estimate e = train::describe_run(config, options.train);
    print(to_json(e),
          fmt::format("{} parameters, {} FLOPs per token, {} steps of {} tokens, about {} on {}\n",
                      Progress::count(double(e.parameters)), Progress::count(e.flops_per_token),
                      e.steps, config.train.tokens_per_step(),
                      Progress::duration(e.estimated_seconds), e.device));
    return;
  }
  const run::Outcome outcome = train::train(config, options.train);
  print(to_json(outcome),
        fmt::format("{}: {} steps, {} tokens in {} ({} tokens/s), {}\n", options.train.run.string(),
                    outcome.steps, Progress::count(double(outcome.tokens)),
                    Progress::duration(outcome.seconds), Progress::count(outcome.tokens_per_second),
                    loss_of(outcome)));
}

void add(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* command =
      subcommand(app, "train", "train one model on a token store; resumable bit for bit");
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
                    "continue from the newest checkpoint in the run folder");
  command->add_flag("--dry-run", o->dry_run,
                    "print parameters, FLOPs and estimated time; write nothing");
  command->callback([o] { run(*o); });
}
const bool registered = commands().add("train", add);

}  // namespace
}  // namespace assay::cli
