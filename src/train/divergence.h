#pragma once
// Stops a run that diverges: a loss or a gradient is not finite, or the loss jumps. The error names
// the first place where a value is not finite, and the newest checkpoint of an earlier step.
#include <c10/core/Device.h>

#include <string>

#include "data/sampler.h"
#include "nn/language_model.h"
#include "run/folder.h"
#include "train/config.h"

namespace assay::train {

// Every check throws Error.
class DivergenceCheck {
 public:
  // All must outlive this.
  DivergenceCheck(nn::LanguageModel& model, const data::Sampler& sampler, const TrainConfig& config,
                  c10::Device device, const run::Folder& folder)
      : model_(model), sampler_(sampler), c_(config), device_(device), folder_(folder) {}

  // After a step of training. `mean_loss`: the running mean of the losses of earlier steps.
  void check_step(int64_t step, double loss, double gradient_norm, double mean_loss);
  // In an evaluation after `step` steps. `nll`: nats of the whole set.
  void check_held_out(int64_t step, const std::string& set, double nll);
  // At the end of the run.
  void check_end(int64_t step, const std::string& set, double loss) const;

 private:
  std::string first_nonfinite(int64_t step);
  void run_forward(int64_t step);
  std::string last_good(int64_t failing_step) const;

  nn::LanguageModel& model_;
  const data::Sampler& sampler_;
  const TrainConfig& c_;
  c10::Device device_;
  const run::Folder& folder_;
};

}  // namespace assay::train
