#pragma once
// The gradient of one step: the sequences of its batch, and the part of it that this process
// computes. The batch is cut into gradient_slices, and the sequences of each of these into
// context_slices. Slice c of part g is leaf g · context_slices + c of the sum of gradients.
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <map>
#include <optional>

#include "data/sampler.h"
#include "nn/context.h"
#include "nn/language_model.h"
#include "train/config.h"
#include "train/gradient_sum.h"
#include "train/rank_neighbours.h"
#include "train/ranks.h"

namespace assay::train {

class StepGradient {
 public:
  // `ranks`: null when this process computes all of it; open otherwise. All must outlive this.
  StepGradient(nn::LanguageModel& model, const data::Sampler& sampler, const TrainConfig& config,
               c10::Device device, Ranks* ranks);
  ~StepGradient();
  StepGradient(const StepGradient&) = delete;

  // The object that sums the gradients of slices; null: one process, one slice.
  GradientSum* sum() { return sum_ ? &*sum_ : nullptr; }

  // On the device: the means of LanguageModel::training_losses, and with ranks whether one of them
  // was asked to stop, and rank 0 to save.
  struct Step {
    at::Tensor losses;
    at::Tensor stop;
    at::Tensor save;
  };
  // Leaves the gradients of the parameters that this process updates. `stop`, `save`: what this
  // rank was asked for.
  Step compute(int64_t step, bool stop, bool save);
  // Before parameters are read other than by compute(). All ranks call it together.
  void gather_parameters() {
    if (ranks_) sum_->gather_parameters();
  }
  // Leaves the gradients for the first `time` tokens of the first `sequences` sequences of the
  // step, in this process. Returns the mean losses.
  at::Tensor compute_part(int64_t step, int64_t sequences, int64_t time);

 private:
  std::map<const void*, size_t> parameter_indices() const;  // by the address of the tensor
  void wait_before_layers();
  std::vector<at::Tensor> compute_slices(int64_t step);
  // Forward and backward of a part of the batch. `last`: no slice of this rank follows.
  at::Tensor whole_sequences(const at::Tensor& tokens, bool last);
  std::vector<at::Tensor> cut_sequences(const at::Tensor& tokens, nn::ContextSlices context,
                                        bool last);
  at::Tensor read_part(int64_t step, int64_t part) const;
  at::Tensor read(int64_t from, int64_t sequences) const;
  at::Tensor backward(const at::Tensor& batch, double slices,
                      const std::function<void()>& before_last);

  nn::LanguageModel& model_;
  const data::Sampler& sampler_;
  const TrainConfig& c_;
  c10::Device device_;
  Ranks* ranks_;
  std::optional<GradientSum> sum_;
  std::optional<RankNeighbours> neighbours_;
};

}  // namespace assay::train
