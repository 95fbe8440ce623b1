#include "train/checkpoint.h"

#include <torch/torch.h>

#include "nn/tensors.h"

namespace assay::train {
namespace {

[[noreturn]] void refuse(const fs::path& folder, const std::string& why) {
  fail(
      "{}\n  The checkpoint {} is broken; nothing was changed. "
      "Remove it to continue from the previous one.",
      why, folder.string());
}

// A folder inside checkpoints/ that is not a checkpoint. It is removed with this object and, if the
// process was killed, by the next one; the run is locked, so nobody else uses it.
class Scratch {
 public:
  explicit Scratch(run::Checkpoint unfinished) : checkpoint(std::move(unfinished)) {
    fs::remove_all(checkpoint.path);
  }
  ~Scratch() {
    std::error_code ignored;
    fs::remove_all(checkpoint.path, ignored);
  }
  Scratch(const Scratch&) = delete;
  const run::Checkpoint checkpoint;
};

}  // namespace

void save_checkpoint(const run::Folder& run, const nn::LanguageModel& model, const AdamW& optimizer,
                     const run::TrainingState& state, const Ranks* ranks) {
  const nn::NamedTensors moments = optimizer.all_moments();
  if (ranks && !ranks->first()) return;
  const run::Checkpoint target = run.checkpoint(state.step);
  if (fs::exists(target.path)) return;  // the same step of the same run: the same bytes
  const Scratch scratch(run.unfinished_checkpoint());
  const run::Checkpoint& unfinished = scratch.checkpoint;
  make_folder(unfinished.path);
  nn::save_tensors(unfinished.weights(), nn::named_parameters_of(model));
  nn::save_tensors(unfinished.moments(), moments);
  unfinished.state().write(state);
  publish_folder(unfinished.path, target.path);
}

run::TrainingState load_checkpoint(const run::Checkpoint& checkpoint, nn::LanguageModel& model,
                                   AdamW& optimizer) {
  const auto copy = [](const fs::path& file, nn::NamedTensors target) {
    nn::copy_tensors(nn::load_tensors(file), std::move(target), file.string());
  };
  try {
    const run::TrainingState state = checkpoint.state().read();
    copy(checkpoint.weights(), nn::named_parameters_of(model));
    copy(checkpoint.moments(), optimizer.moments());
    return state;
  } catch (const BadInput& error) {
    refuse(checkpoint.path, error.what());
  }
}

std::optional<run::Checkpoint> newest_checkpoint(const run::Folder& run, int64_t last_step) {
  auto found = run.checkpoints();
  found.erase(found.upper_bound(last_step), found.end());
  return found.empty() ? std::nullopt : std::optional(found.rbegin()->second);
}

void prune_checkpoints(const run::Folder& run, const std::vector<int64_t>& keep_steps) {
  const auto found = run.checkpoints();
  size_t left = found.size();
  for (const auto& [step, checkpoint] : found) {
    const bool is_newest = left <= 2;
    --left;
    if (is_newest || std::ranges::find(keep_steps, step) != keep_steps.end()) continue;
    // A process that is killed here leaves no part of a checkpoint under its name.
    const Scratch old(run.removed_checkpoint());
    publish_folder(checkpoint.path, old.checkpoint.path);
  }
}

void remove_scratch(const run::Folder& run) {
  const Scratch writing(run.unfinished_checkpoint());
  const Scratch removing(run.removed_checkpoint());
}

}  // namespace assay::train
