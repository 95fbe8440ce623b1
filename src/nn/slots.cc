#include "nn/slots.h"

#include <torch/torch.h>

namespace assay::nn {
namespace {

// Copies the row of each tensor [1, …] into row `slot` of the batch. Scalars count positions, which
// the batch has in State::positions.
void put_row(State& batch, const State& row, int64_t slot, int64_t count) {
  for (const auto& [name, tensor] : row.tensors()) {
    if (tensor.dim() == 0) continue;
    at::Tensor& rows = batch[name];
    if (!rows.defined()) {
      auto sizes = tensor.sizes().vec();
      sizes[0] = count;
      rows = at::zeros(sizes, tensor.options());
    }
    rows[slot].copy_(tensor[0]);
  }
}

}  // namespace

Slots::Slots(LanguageModel& model, int64_t count) : model_(model) {
  state_.positions.assign(size_t(count), -1);
  state_.layers.resize(model.layers.size());
  for (size_t i = 0; i < model.layers.size(); ++i)
    if (model.layers[i]->mixer->caches_per_row()) state_.layers[i].rows.resize(size_t(count));
}

void Slots::put(int64_t slot, const ModelState& state) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < state_.layers.size(); ++i) {
    State& layer = state_.layers[i];
    if (layer.rows.empty()) put_row(layer, state.layers[i], slot, count());
    else layer.rows[size_t(slot)] = state.layers[i];
  }
  state_.positions[size_t(slot)] = state.position;
}

// The rows of an unused slot take part in every step, so they go back to zeros.
void Slots::clear(int64_t slot) {
  const at::NoGradGuard no_grad;
  for (State& layer : state_.layers) {
    for (const auto& [name, tensor] : layer.tensors()) layer[name][slot].zero_();
    if (!layer.rows.empty()) layer.rows[size_t(slot)] = State();
  }
  state_.positions[size_t(slot)] = -1;
}

at::Tensor Slots::step(const std::vector<int64_t>& tokens) {
  const at::NoGradGuard no_grad;
  std::vector<int64_t> read = tokens;
  for (int64_t slot = 0; slot < count(); ++slot)
    if (!used(slot)) read[size_t(slot)] = 0;
  const at::Tensor column = at::tensor(read, at::kLong).unsqueeze(1).to(model_.embedding.device());
  return model_.logits(column, state_).squeeze(1);
}

}  // namespace assay::nn
