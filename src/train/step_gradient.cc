#include "train/step_gradient.h"

#include <torch/torch.h>

namespace assay::train {
namespace {

// The gradients of the slices of a sequence, each a leaf of the sum, so they are kept apart until
// all micro-batches have added to them.
class SliceGradients {
 public:
  SliceGradients(std::vector<at::Tensor> parameters, int64_t slices)
      : parameters_(std::move(parameters)),
        gradients_(size_t(slices), std::vector<at::Tensor>(parameters_.size())) {}
  // Takes what backward passes left in the parameters.
  void take(size_t slice) {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      at::Tensor& gradient = parameters_[i].mutable_grad();
      if (!gradient.defined()) continue;
      at::Tensor& sum = gradients_[slice][i];
      if (sum.defined()) sum.add_(gradient);
      else sum = gradient;
      gradient.reset();
    }
  }
  void give_back(size_t slice) {
    for (size_t i = 0; i < parameters_.size(); ++i)
      parameters_[i].mutable_grad() = std::move(gradients_[slice][i]);
  }

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<std::vector<at::Tensor>> gradients_;
};

}  // namespace

StepGradient::StepGradient(nn::LanguageModel& model, const data::Sampler& sampler,
                           const TrainConfig& config, c10::Device device, Ranks* ranks)
    : model_(model), sampler_(sampler), c_(config), device_(device), ranks_(ranks) {
  const int64_t slices = c_.gradient_slices * c_.context_slices;
  if (!ranks && slices == 1) return;
  const std::map<const void*, size_t> indices = parameter_indices();
  const auto index_of = [&](const nn::Linear* linear) {
    return indices.at(linear->weight.unsafeGetTensorImpl());
  };
  std::vector<bool> rounded(indices.size());
  if (model.compute_dtype == at::kBFloat16)
    for (const nn::Linear* linear : nn::linears_of(model))
      rounded[index_of(linear)] = linear != model.head.get();  // the loss reads that of the head
  // Layers whose sequences are cut have several backward passes of their own
  sum_.emplace(model.parameters(), slices, ranks, /*overlap=*/c_.context_slices == 1, rounded);
  if (!ranks) return;
  neighbours_.emplace(*ranks, device);
  for (nn::Linear* linear : nn::linears_of(model)) {
    linear->gradient_place = sum_->place(index_of(linear));
    linear->rounded = sum_->rounded(index_of(linear));
  }
  wait_before_layers();
}

StepGradient::~StepGradient() {
  model_.before = nullptr;
  for (nn::Linear* linear : nn::linears_of(model_)) {
    linear->gradient_place.reset();
    linear->rounded.reset();
  }
}

std::map<const void*, size_t> StepGradient::parameter_indices() const {
  std::map<const void*, size_t> indices;
  const std::vector<at::Tensor> parameters = model_.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) indices[parameters[i].unsafeGetTensorImpl()] = i;
  return indices;
}

void StepGradient::wait_before_layers() {
  const std::map<const void*, size_t> indices = parameter_indices();
  const auto first = [&](const std::vector<at::Tensor>& some) {
    size_t bucket = sum_->pieces().buckets.size();
    for (const at::Tensor& parameter : some) {
      const size_t index = indices.at(parameter.unsafeGetTensorImpl());
      bucket = std::min(bucket, sum_->pieces().parts[index].front().bucket);
    }
    return bucket;
  };
  // The first bucket of what is read first, of each layer, and of what follows them
  std::vector<at::Tensor> start = model_.parameters(/*recurse=*/false);
  if (model_.embedding_norm)
    for (const at::Tensor& parameter : model_.embedding_norm->parameters())
      start.push_back(parameter);
  std::vector<size_t> needed = {first(start)};
  for (const auto& layer : model_.layers) needed.push_back(first(layer->parameters()));
  needed.push_back(0);
  model_.before = [this, needed](int64_t layer) {
    sum_->wait_for_parameters(needed[size_t(layer + 1)]);
  };
}

StepGradient::Step StepGradient::compute(int64_t step, bool stop, bool save) {
  if (!sum_) return {compute_part(step, c_.batch_size, c_.sequence_length)};
  if (ranks_) sum_->divide_parameters();
  std::vector<at::Tensor> values = compute_slices(step);
  sum_->finish();
  if (!ranks_) return {tree_sum(values)};
  const int64_t losses = values.front().numel();
  for (const bool asked : {stop, save})
    values.push_back(at::full({1}, double(asked), values.front().options()));
  const at::Tensor all = ranks_->gather(at::cat(values));
  return {tree_sum(all.slice(1, 0, -2).reshape({-1, losses}).unbind()), all.select(1, -2).amax(),
          all[0][-1]};
}

// Forward and backward of the slices of this rank, up to sum_->finish(). Returns the losses of
// each.
std::vector<at::Tensor> StepGradient::compute_slices(int64_t step) {
  std::vector<at::Tensor> losses;
  const int64_t context = c_.context_slices;
  for (int64_t leaf = sum_->begin(); leaf < sum_->end();) {
    const int64_t part = leaf / context;
    const int64_t begin = leaf % context;
    const int64_t end = std::min(context, begin + sum_->end() - leaf);
    const at::Tensor tokens = read_part(step, part);
    const bool last = part * context + end == sum_->end();
    const std::vector<at::Tensor> of_part =
        context == 1 ? std::vector<at::Tensor>{whole_sequences(tokens, last)}
                     : cut_sequences(tokens, {context, begin, end}, last);
    for (const at::Tensor& loss : of_part) losses.push_back(loss.to(at::kDouble));
    leaf += end - begin;
  }
  return losses;
}

at::Tensor StepGradient::whole_sequences(const at::Tensor& tokens, bool last) {
  if (last) sum_->start_last_slice();
  const at::Tensor losses = backward(tokens, double(c_.gradient_slices), [&] {
    if (last) sum_->start_last();
  });
  if (!last) sum_->keep();
  return losses;
}

std::vector<at::Tensor> StepGradient::cut_sequences(const at::Tensor& tokens,
                                                    nn::ContextSlices context, bool last) {
  const int64_t here = context.end - context.begin;
  const int64_t time = c_.sequence_length / context.count;
  const auto micro_batches =
      tokens.narrow(1, context.begin * time, here * time + 1).split(c_.micro_batch_size);
  const double divisor = double(c_.gradient_slices * context.count) * double(micro_batches.size());
  SliceGradients gradients(model_.parameters(), here);
  if (ranks_) sum_->wait_for_parameters();
  std::vector<at::Tensor> losses;
  for (const at::Tensor& micro_batch : micro_batches) {
    const auto added =
        nn::sliced_loss(model_, micro_batch, context, neighbours_ ? &*neighbours_ : nullptr,
                        divisor, [&](size_t slice) { gradients.take(slice); });
    if (losses.empty()) losses = added;
    else at::_foreach_add_(losses, added);
  }
  for (int64_t i = 0; i < here; ++i) {
    gradients.give_back(size_t(i));
    if (last && i + 1 == here) sum_->start_last();
    else sum_->keep();
  }
  return losses;
}

at::Tensor StepGradient::compute_part(int64_t step, int64_t sequences, int64_t time) {
  return backward(read(step * sequences, sequences).slice(1, 0, time + 1), 1, [] {});
}

at::Tensor StepGradient::read_part(int64_t step, int64_t part) const {
  const int64_t sequences = c_.batch_size / c_.gradient_slices;
  return read(step * c_.batch_size + part * sequences, sequences);
}

// Samples `from` and the following ones, on the device.
at::Tensor StepGradient::read(int64_t from, int64_t sequences) const {
  const at::Tensor batch = at::empty({sequences, c_.sequence_length + 1},
                                     at::TensorOptions(at::kLong).pinned_memory(device_.is_cuda()));
  for (int64_t i = 0; i < sequences; ++i)
    sampler_.sample(from + i, batch.data_ptr<int64_t>() + i * (c_.sequence_length + 1));
  return batch.to(device_, /*non_blocking=*/true);
}

// The mean losses of `batch` divided by `slices`, and the gradient of their sum. Calls
// `before_last` before the last backward pass.
at::Tensor StepGradient::backward(const at::Tensor& batch, double slices,
                                  const std::function<void()>& before_last) {
  at::Tensor total;
  const std::vector<at::Tensor> parts = batch.split(c_.micro_batch_size);
  for (size_t i = 0; i < parts.size(); ++i) {
    const at::Tensor losses = model_.training_losses(parts[i]) / (slices * double(parts.size()));
    if (i + 1 == parts.size()) before_last();
    losses.sum().backward();
    total = total.defined() ? total + losses.detach() : losses.detach();
  }
  return total;
}

}  // namespace assay::train
