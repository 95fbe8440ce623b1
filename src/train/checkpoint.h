#pragma once
// Checkpoints of a run (run/folder.h), each folder whole or absent.
#include <optional>
#include <vector>

#include "nn/language_model.h"
#include "run/folder.h"
#include "train/optimizer.h"

namespace assay::train {

// With `ranks`, all of them call it, and each writes some of the tensors: the files do not depend
// on their number. Rank 0 writes those of a rank that cannot open the files. An error of one rank
// ends all, and nothing is left.
void save_checkpoint(const run::Folder& run, const nn::LanguageModel& model, const AdamW& optimizer,
                     const run::TrainingState& state, Ranks* ranks = nullptr);
// BadInput when the checkpoint is broken.
run::TrainingState load_checkpoint(const run::Checkpoint& checkpoint, nn::LanguageModel& model,
                                   AdamW& optimizer);
// The checkpoint of that step, or the newest one before it; no value if there is none.
std::optional<run::Checkpoint> newest_checkpoint(const run::Folder& run,
                                                 int64_t last_step = INT64_MAX);
// Removes all but the newest two and those of `keep_steps`.
void prune_checkpoints(const run::Folder& run, const std::vector<int64_t>& keep_steps);
// Removes what a process left that was killed while it saved or pruned.
void remove_scratch(const run::Folder& run);

}  // namespace assay::train
