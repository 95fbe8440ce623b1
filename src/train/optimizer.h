#pragma once
// AdamW with decoupled weight decay [Loshchilov & Hutter 2019, Alg. 2] on the
// model's fp32 parameters.
#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "nn/language_model.h"
#include "nn/tensors.h"
#include "ops/dense/adamw/adamw.h"
#include "train/config.h"
#include "train/gradient_sum.h"

namespace assay::train {

using TensorFunction = std::function<void(const std::string& name, const at::Tensor& tensor)>;

class AdamW {
 public:
  // `sum`: null, or what sums the gradients of slices. With ranks, this process updates the parts
  // that it owns, starts to send them to the other ranks, and has their moments only.
  AdamW(nn::LanguageModel& model, const TrainConfig& config, GradientSum* sum = nullptr);
  // Clips the gradients to `clip` in norm, updates, clears them. Returns the norm before clipping,
  // a scalar on the device. A gradient that is not finite changes nothing, and neither does any
  // step after it.
  at::Tensor step(double learning_rate, int64_t step);

  // "<parameter>.exp_avg", "<parameter>.exp_avg_sq": names and shapes, on the meta device.
  nn::NamedTensors moments() const;
  // Each moment, whole, once, in an order of its own. All ranks call it.
  void read_moments(const TensorFunction& read) const;
  // Each moment likewise, to be filled by `write`. Each process keeps its parts.
  void write_moments(const TensorFunction& write);

 private:
  struct Group {
    std::vector<size_t> parameters;
    // the first times the run's
    double learning_rate;
    double weight_decay;
  };
  using Moments = std::array<at::Tensor, 2>;  // averages of gradients, and of their squares
  // One call of ops::adamw_: the parts of a bucket and group.
  struct Update {
    size_t group = 0;
    std::vector<size_t> parts;  // of parts_
    ops::AdamWTensors tensors;  // the moments
  };
  Ranks* ranks() const { return sum_ ? sum_->ranks() : nullptr; }
  void keep_rounded_weights(const nn::LanguageModel& model);
  void add_to_update(const Part& part, size_t group);
  at::Tensor gradient(const Part& part) const;
  at::Tensor values(const Part& part) const;
  at::Tensor rounded_part(const Part& part) const;
  at::Tensor norms_of_gradients(const std::vector<at::Tensor>& gradients) const;
  void in_whole(size_t bucket, const Moments& whole, const TensorFunction& work) const;

  std::vector<std::string> names_;
  std::vector<at::Tensor> parameters_;
  std::vector<c10::intrusive_ptr<ops::RoundedWeight>> rounded_;  // by parameter; null: none
  GradientSum* sum_;
  Pieces pieces_;
  std::vector<Group> groups_;     // by what the model says of each parameter (LanguageModel::group)
  std::vector<Part> parts_;       // of this process, in the order of the groups
  std::vector<Moments> moments_;  // by bucket: flat, of this process
  std::vector<std::vector<Update>> updates_;  // by bucket
  int64_t count_ = 0;                         // of the parts of all processes
  at::Tensor positions_;  // on the device: in the order of the groups, those of this process
  at::Tensor broken_;     // f32 scalar on the device: 1 after a gradient that was not finite
  double beta1_;
  double beta2_;
  double epsilon_;
  double clip_;
};

}  // namespace assay::train
