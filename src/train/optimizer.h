#pragma once
// AdamW with decoupled weight decay [Loshchilov & Hutter 2019, Alg. 2] on the
// model's fp32 parameters.
#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "nn/language_model.h"
#include "nn/tensors.h"
#include "train/config.h"
#include "train/gradient_sum.h"

namespace assay::train {

class AdamW {
 public:
  // `sum`: null, or what sums the gradients of ranks. Then this process updates the parameters that
  // it owns, sends them to the other ranks, and has their moments only.
  AdamW(nn::LanguageModel& model, const TrainConfig& config, GradientSum* sum = nullptr);
  // Clips the gradients to `clip` in norm, updates, clears them. Returns the norm before clipping,
  // a scalar on the device. A gradient that is not finite changes nothing, and neither does any
  // step after it.
  at::Tensor step(double learning_rate, int64_t step);
  // "<parameter>.exp_avg", "<parameter>.exp_avg_sq". Those of other ranks are on the meta device:
  // a checkpoint that is copied into them is checked and changes nothing.
  nn::NamedTensors moments() const;
  // The rank that updates a parameter, by the names of the parameter and of its moments.
  std::map<std::string, int64_t> owners() const;

 private:
  struct Group {
    std::vector<std::string> names;
    std::vector<at::Tensor> parameters;
    std::vector<at::Tensor> averages;
    std::vector<at::Tensor> squares;
    std::vector<int64_t> owners;  // ranks
    // the first times the run's
    double learning_rate;
    double weight_decay;
  };
  bool own(const Group& group, size_t i) const;
  at::Tensor norms_of_gradients();
  at::Tensor at_all_positions(const std::vector<at::Tensor>& norms);

  std::vector<Group> groups_;  // by what the model says of each parameter (LanguageModel::group)
  GradientSum* sum_;
  int64_t count_ = 0;     // of all parameters
  at::Tensor positions_;  // on the device: in the order of the groups, those of this process
  at::Tensor broken_;     // f32 scalar on the device: 1 after a gradient that was not finite
  double beta1_;
  double beta2_;
  double epsilon_;
  double clip_;
};

}  // namespace assay::train
