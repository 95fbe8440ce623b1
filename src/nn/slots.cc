#include "nn/slots.h"

#include <torch/torch.h>

#include <algorithm>
#include <set>

namespace assay::nn {
namespace {

// Copies the row of a tensor [1, …] into row `slot` of the batch. Scalars count positions, which
// the batch has in State::positions.
void put_row(State& batch, const std::string& name, const at::Tensor& row, int64_t slot,
             int64_t count) {
  if (row.dim() == 0) return;
  at::Tensor& rows = batch[name];
  if (!rows.defined()) {
    auto sizes = row.sizes().vec();
    sizes[0] = count;
    rows = at::zeros(sizes, row.options());
  }
  rows[slot].copy_(row[0]);
}

// The names of the tensors that the channel mixer of a layer keeps in the state.
std::set<std::string> names_of_channel_mixer(const LanguageModel& model, const Layer& layer) {
  std::set<std::string> names;
  if (!layer.channel_mixer) return names;
  const at::NoGradGuard no_grad;
  State state;
  layer.channel_mixer->forward(at::zeros({1, 1, model.spec.config.d_model},
                                         model.embedding.options().dtype(model.product_dtype())),
                               state);
  for (const auto& [name, tensor] : state.tensors()) names.insert(name);
  return names;
}

}  // namespace

Slots::Slots(LanguageModel& model, int64_t count) : Slots(model, Exactly{rows_for(model, count)}) {
  count_ = count;
}

Slots::Slots(LanguageModel& model, Exactly number) : model_(model), count_(number.rows) {
  state_.positions.assign(size_t(number.rows), -1);
  state_.layers.resize(model.layers.size());
  for (const auto& layer : model.layers)
    of_channel_mixer_.push_back(names_of_channel_mixer(model, *layer));
  for (size_t i = 0; i < model.layers.size(); ++i)
    if (model.layers[i]->mixer->caches_per_row()) state_.layers[i].rows.resize(size_t(number.rows));
}

// `count` or a little more. The kernels take rows in blocks of some of these sizes.
int64_t Slots::rows_for(LanguageModel& model, int64_t count) {
  if (!model.embedding.is_cpu()) return count;
  std::set<int64_t> numbers;
  for (const int64_t block : {1, 4, 6, 8, 12, 16, 24, 32, 48, 96})
    numbers.insert((count + block - 1) / block * block);
  for (const int64_t rows : numbers)
    if (rows_are_alike(model, rows)) return rows;
  return count;
}

// Two algorithms often round to the same bits, such as exponentials in vectors and one by one. So a
// model with few layers, which computes few of them in a step, takes more steps.
bool Slots::rows_are_alike(LanguageModel& model, int64_t rows) {
  const at::NoGradGuard no_grad;
  const at::Tensor prompt = at::zeros({1, 1}, at::kLong);
  ModelState state;
  model.hidden(prompt, state);
  Slots slots(model, Exactly{rows});
  for (int64_t slot = 0; slot < rows; ++slot) slots.put(slot, state);
  const int64_t enough = std::max<int64_t>(24, 192 / int64_t(model.layers.size()));
  const int64_t steps = std::min(enough, model.max_time() - 1);
  for (int64_t step = 0; step < steps; ++step) {
    const std::vector<int64_t> tokens(size_t(rows),
                                      (7 * step + step / 5) % model.spec.config.vocab_size);
    const at::Tensor logits = slots.step(tokens);
    if (!at::equal(logits, logits.slice(0, 0, 1).expand_as(logits))) return false;
  }
  return true;
}

void Slots::put(int64_t slot, const ModelState& state) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < state_.layers.size(); ++i) {
    State& layer = state_.layers[i];
    for (const auto& [name, tensor] : state.layers[i].tensors())
      if (layer.rows.empty() || of_channel_mixer_[i].contains(name))
        put_row(layer, name, tensor, slot, rows());
    if (!layer.rows.empty()) layer.rows[size_t(slot)] = state.layers[i];
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
  std::vector<int64_t> read(size_t(rows()), 0);
  for (int64_t slot = 0; slot < count(); ++slot)
    if (used(slot)) read[size_t(slot)] = tokens[size_t(slot)];
  const at::Tensor column = at::tensor(read, at::kLong).unsqueeze(1).to(model_.embedding.device());
  return model_.logits(column, state_).squeeze(1).slice(0, 0, count());
}

}  // namespace assay::nn
