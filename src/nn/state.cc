#include "nn/state.h"

#include <torch/torch.h>

#include <algorithm>

namespace assay::nn {

int64_t RowPositions::end() const { return std::ranges::max(read) + 1; }

at::Tensor RowPositions::index(const at::Device& device) const {
  return (on_device.defined() ? on_device : at::tensor(read, at::kLong).to(device)).clamp_min(0);
}

void RowPositions::advance(int64_t tokens) {
  for (int64_t& position : read) position += position < 0 ? 0 : tokens;
  if (on_device.defined()) on_device.add_(on_device.ge(0), tokens);
}

void Context::add_auxiliary_loss(const at::Tensor& loss) {
  at::Tensor& sum = handed.at(kAuxiliaryLoss);
  sum = sum + loss;
}

int64_t State::bytes() const {
  int64_t total = 0;
  for (const auto& [name, tensor] : tensors_) total += tensor.numel() * tensor.element_size();
  return total;
}

int64_t State::advance(int64_t time) {
  if (!context.rows.empty()) return 0;
  const auto held = find("position");
  const int64_t position = held ? held->item<int64_t>() : 0;
  tensors_["position"] = at::full({}, position + time, at::kLong);
  return position;
}

}  // namespace assay::nn
