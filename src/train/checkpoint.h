#pragma once
// Checkpoints: RUN/checkpoints/step-N/{model.safetensors, optimizer.safetensors, state.json}, each
// folder whole or absent.
#include <optional>
#include <string>
#include <vector>

#include "base/files.h"
#include "nn/language_model.h"
#include "train/optimizer.h"

namespace assay::train {

// All that a run needs beside weights and moments to go on as if it had never stopped.
struct Progressed {
  int64_t step = 0;          // optimizer steps done; the data state is this one integer
  double interval_loss = 0;  // Σ of losses since the last line of metrics
  int64_t interval_steps = 0;
  double evaluation_loss = 0;  // Σ of losses since the last evaluation
  int64_t evaluation_steps = 0;
  double last_loss = 0;  // of the last step
  double mean_loss = 0;  // running mean that a spike is measured against
  double seconds = 0;    // of training, over all sittings
};

void save_checkpoint(const fs::path& run, const nn::LanguageModel& model, const AdamW& optimizer,
                     const Progressed& progressed);
// BadInput when broken
Progressed load_checkpoint(const fs::path& folder, nn::LanguageModel& model, AdamW& optimizer);
std::optional<fs::path> newest_checkpoint(const fs::path& run,
                                          int64_t last_step = INT64_MAX);  // of that step or before
// Removes all but the newest two and those of `keep_steps`.
void prune_checkpoints(const fs::path& run, const std::vector<int64_t>& keep_steps);

}  // namespace assay::train
