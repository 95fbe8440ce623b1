#include "train/step_gradient.h"

#include <torch/torch.h>

namespace assay::train {

StepGradient::StepGradient(nn::LanguageModel& model, const data::Sampler& sampler,
                           const TrainConfig& config, c10::Device device, Ranks* ranks)
    : model_(model), sampler_(sampler), c_(config), device_(device), ranks_(ranks) {
  if (!ranks && c_.gradient_slices == 1) return;
  // A layer that is computed again has a backward pass of its own
  sum_.emplace(model.parameters(), c_.gradient_slices, ranks, !c_.recompute_activations);
}

StepGradient::Step StepGradient::compute(int64_t step, bool stop, bool save) {
  if (!sum_) return {compute_part(step, c_.batch_size, c_.sequence_length)};
  std::vector<at::Tensor> values = compute_slices(step);
  sum_->finish();
  if (!ranks_) return {tree_sum(values)};
  const int64_t slices = int64_t(values.size());
  for (const bool asked : {stop, save})
    values.push_back(at::full({}, double(asked), values.front().options()));
  const at::Tensor all = ranks_->gather(at::stack(values));
  return {tree_sum(all.slice(1, 0, slices).flatten().unbind()), all.select(1, slices).amax(),
          all[0][slices + 1]};
}

// Forward and backward of the slices of this rank, up to sum_->finish(). Returns their losses.
std::vector<at::Tensor> StepGradient::compute_slices(int64_t step) {
  const int64_t sequences = c_.batch_size / c_.gradient_slices;
  std::vector<at::Tensor> losses;
  for (int64_t slice = sum_->begin(); slice < sum_->end(); ++slice) {
    const bool last = slice + 1 == sum_->end();
    const int64_t from = step * c_.batch_size + slice * sequences;
    const at::Tensor loss = backward(read(from, sequences), double(c_.gradient_slices), [&] {
      if (last) sum_->start_last();
    });
    losses.push_back(loss.to(at::kDouble));
    if (!last) sum_->keep();
  }
  return losses;
}

at::Tensor StepGradient::compute_part(int64_t step, int64_t sequences, int64_t time) {
  return backward(read(step * sequences, sequences).slice(1, 0, time + 1), 1, [] {});
}

// Samples `from` and the following ones, on the device.
at::Tensor StepGradient::read(int64_t from, int64_t sequences) const {
  const at::Tensor batch = at::empty({sequences, c_.sequence_length + 1},
                                     at::TensorOptions(at::kLong).pinned_memory(device_.is_cuda()));
  for (int64_t i = 0; i < sequences; ++i)
    sampler_.sample(from + i, batch.data_ptr<int64_t>() + i * (c_.sequence_length + 1));
  return batch.to(device_, /*non_blocking=*/true);
}

// The mean loss of `batch` divided by `slices`, and its gradient. Calls `before_last` before the
// last backward pass.
at::Tensor StepGradient::backward(const at::Tensor& batch, double slices,
                                  const std::function<void()>& before_last) {
  at::Tensor total = at::zeros({}, at::TensorOptions().device(device_).dtype(
                                       at::promote_types(model_.compute_dtype, at::kFloat)));
  const std::vector<at::Tensor> parts = batch.split(c_.micro_batch_size);
  for (size_t i = 0; i < parts.size(); ++i) {
    const at::Tensor loss = model_.loss(parts[i]) / (slices * double(parts.size()));
    if (i + 1 == parts.size()) before_last();
    loss.backward();
    total += loss.detach();
  }
  return total;
}

}  // namespace assay::train
