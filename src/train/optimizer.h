#pragma once
// AdamW with decoupled weight decay [Loshchilov & Hutter 2019, Alg. 2] on the
// model's fp32 parameters.
#include <ATen/core/Tensor.h>

#include <vector>

#include "nn/language_model.h"
#include "nn/tensors.h"
#include "train/config.h"

namespace assay::train {

class AdamW {
 public:
  AdamW(nn::LanguageModel& model, const TrainConfig& config);
  // Clips the gradients to `clip` in norm, updates, clears them. Returns the norm before clipping,
  // a scalar on the device. A gradient that is not finite changes nothing, and neither does any
  // step after it.
  at::Tensor step(double learning_rate, int64_t step);
  nn::NamedTensors moments() const;  // "<parameter>.exp_avg", "<parameter>.exp_avg_sq"

 private:
  struct Group {
    std::vector<std::string> names;
    std::vector<at::Tensor> parameters, averages, squares;
    double learning_rate, weight_decay;  // the first times the run's
  };
  std::vector<Group> groups_;  // by what the model says of each parameter (LanguageModel::group)
  at::Tensor broken_;          // f32 scalar on the device: 1 after a gradient that was not finite
  double beta1_, beta2_, epsilon_, clip_;
};

}  // namespace assay::train
