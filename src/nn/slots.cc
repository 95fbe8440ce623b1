#include "nn/slots.h"

#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <bit>
#include <map>

#include "ops/core/asynchronous.h"

namespace assay::nn {
namespace {

constexpr int64_t kLeastCapacity = 1024;  // of a captured step

// Copies the row of a tensor [1, …] into row `slot` of the batch. Scalars count positions, which
// the batch has in RowPositions.
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

at::TensorOptions options_of_inputs(const LanguageModel& model) {
  return model.embedding.options().dtype(model.product_dtype());
}

// The names of the tensors that the channel mixer of a layer keeps in the state.
std::set<std::string> names_of_channel_mixer(const LanguageModel& model, const Layer& layer) {
  std::set<std::string> names;
  if (!layer.channel_mixer) return names;
  const at::NoGradGuard no_grad;
  State state;
  layer.channel_mixer->forward(
      at::zeros({1, 1, model.spec.config.d_model}, options_of_inputs(model)), state);
  for (const auto& [name, tensor] : state.tensors()) names.insert(name);
  return names;
}

}  // namespace

bool steps_can_be_captured(const LanguageModel& model) {
  const at::TensorOptions inputs = options_of_inputs(model);
  return inputs.device().is_cuda() && !model.watch &&
         std::ranges::all_of(model.layers, [&](const auto& layer) {
           return layer->mixer->can_be_captured(inputs);
         });
}

DrawnTokens::DrawnTokens(const at::Tensor& tokens)
    : tokens_(tokens.to(at::TensorOptions(at::kCPU), /*non_blocking=*/true)) {
  if (!tokens.is_cuda()) return;
  copied_.emplace(tokens.device().type());
  copied_->record(c10::impl::VirtualGuardImpl(tokens.device().type()).getStream(tokens.device()));
}

std::span<const int64_t> DrawnTokens::wait() const {
  if (copied_) copied_->synchronize();
  return {tokens_.data_ptr<int64_t>(), size_t(tokens_.size(0))};
}

Slots::Slots(LanguageModel& model, int64_t count, int64_t capacity)
    : Slots(model, Exactly{rows_for(model, count)}, capacity) {
  count_ = count;
}

Slots::Slots(LanguageModel& model, Exactly number, int64_t capacity)
    : model_(model), count_(number.rows), least_capacity_(capacity) {
  state_.rows.read.assign(size_t(number.rows), -1);
  state_.layers.resize(model.layers.size());
  memory_.resize(model.layers.size());
  for (const auto& layer : model.layers)
    of_channel_mixer_.push_back(names_of_channel_mixer(model, *layer));
  for (size_t i = 0; i < model.layers.size(); ++i)
    if (!model.layers[i]->mixer->caches().empty())
      state_.layers[i].rows.states.resize(size_t(number.rows));
  tokens_ = at::zeros({number.rows}, model.embedding.options().dtype(at::kLong));
  if (model.embedding.is_cuda()) use_device_positions();
}

void Slots::use_device_positions() {
  const auto integers = tokens_.options();
  state_.rows.on_device = at::full({rows()}, -1, integers);
  state_.rows.capacity = std::max(least_capacity_, kLeastCapacity);
  capacities_.assign(size_t(rows()), 0);
  can_be_captured_ = steps_can_be_captured(model_);
  std::vector<int64_t> numbers;  // of caches of each layer
  int64_t places = 0;
  for (const auto& layer : model_.layers) {
    const bool on_device = layer->mixer->can_be_captured(options_of_inputs(model_));
    numbers.push_back(on_device ? std::ssize(layer->mixer->caches()) : 0);
    first_place_.push_back(places);
    places += rows() * numbers.back();
  }
  caches_ = at::zeros({places}, integers);
  places_ = at::zeros({places}, at::kLong);
  for (size_t i = 0; i < numbers.size(); ++i)
    if (numbers[i] > 0)
      state_.layers[i].rows.addresses =
          caches_.narrow(0, first_place_[i], rows() * numbers[i]).view({rows(), numbers[i]});
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
  const at::Tensor token = prompt[0];
  ModelState state;
  model.hidden(prompt, state);
  Slots slots(model, Exactly{rows}, 0);
  for (int64_t slot = 0; slot < rows; ++slot) slots.put(slot, state, token);
  const int64_t enough = std::max<int64_t>(24, 192 / int64_t(model.layers.size()));
  const int64_t steps = std::min(enough, model.max_time() - 1);
  for (int64_t step = 0; step < steps; ++step) {
    const std::vector<int64_t> tokens(size_t(rows),
                                      (7 * step + step / 5) % model.spec.config.vocab_size);
    const at::Tensor& logits = slots.step(tokens);
    if (!at::equal(logits, logits.slice(0, 0, 1).expand_as(logits))) return false;
  }
  return true;
}

void Slots::put(int64_t slot, const ModelState& state, const at::Tensor& token) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < state_.layers.size(); ++i) {
    State& layer = state_.layers[i];
    for (const auto& [name, tensor] : state.layers[i].tensors())
      if (layer.rows.states.empty() || of_channel_mixer_[i].contains(name))
        put_row(layer, name, tensor, slot, rows());
    if (!layer.rows.states.empty()) layer.rows.states[size_t(slot)] = state.layers[i];
  }
  state_.rows.read[size_t(slot)] = state.position;
  tokens_.slice(0, slot, slot + 1).copy_(token.clamp_min(0), /*non_blocking=*/true);
  if (!state_.rows.on_device.defined()) return;
  state_.rows.on_device[slot].fill_(state.position);
  capacities_[size_t(slot)] = 0;
  reserve(size_t(slot), capacity_for(state.position + 1));
}

int64_t Slots::capacity_for(int64_t tokens) const {
  return tokens <= least_capacity_ ? least_capacity_ : int64_t(std::bit_ceil(uint64_t(tokens)));
}

// Gives a cache of a slot memory for `capacity` tokens. The least capacity of all slots is one
// block per cache, so that reading a prompt does not leave gaps between the caches of slots. What
// the cache holds is added to `copies`.
at::Tensor Slots::memory_of(const Cache& cache, size_t layer, size_t slot, int64_t capacity,
                            Copies& copies) {
  State& row = state_.layers[layer].rows.states[slot];
  if (cache.window() > 0 || capacity != least_capacity_)
    return cache.reserve(row, state_.rows.read[slot], capacity);
  const at::Tensor held = cache.held(row);
  at::Tensor& memory = memory_[layer][cache.name()];
  if (!memory.defined()) {
    auto sizes = held.sizes().vec();
    sizes[0] = rows();
    sizes[1] = capacity / cache.tokens();
    memory = at::empty(sizes, held.options());
  }
  const at::Tensor own = memory.narrow(0, int64_t(slot), 1);
  copies.to.push_back(own.narrow(1, 0, held.size(1)));
  copies.from.push_back(held);
  return row[cache.name()] = own;
}

// Memory for `capacity` tokens in the caches of a slot.
void Slots::reserve(size_t slot, int64_t capacity) {
  Copies copies;
  for (size_t i = 0; i < state_.layers.size(); ++i) {
    if (!has_device_caches(i)) continue;
    const std::vector<Cache>& caches = model_.layers[i]->mixer->caches();
    int64_t* place =
        places_.data_ptr<int64_t>() + first_place_[i] + int64_t(slot) * std::ssize(caches);
    for (const Cache& cache : caches)
      *place++ = reinterpret_cast<int64_t>(memory_of(cache, i, slot, capacity, copies).data_ptr());
  }
  if (!copies.to.empty()) at::_foreach_copy_(copies.to, copies.from);
  capacities_[slot] = capacity;
  places_changed_ = true;
}

// The rows of an unused slot take part in every step, so they go back to zeros.
void Slots::clear(int64_t slot) {
  const at::NoGradGuard no_grad;
  for (State& layer : state_.layers) {
    for (const auto& [name, tensor] : layer.tensors()) layer[name][slot].zero_();
    if (!layer.rows.states.empty()) layer.rows.states[size_t(slot)] = State();
  }
  state_.rows.read[size_t(slot)] = -1;
  tokens_[slot].zero_();
  if (state_.rows.on_device.defined()) state_.rows.on_device[slot].fill_(-1);
}

const at::Tensor& Slots::step(const std::vector<int64_t>& tokens) {
  const at::NoGradGuard no_grad;
  std::vector<int64_t> read(size_t(rows()), 0);
  for (int64_t slot = 0; slot < count(); ++slot)
    if (used(slot)) read[size_t(slot)] = tokens[size_t(slot)];
  tokens_.copy_(at::tensor(read, at::kLong));
  step(std::vector<ops::Draw>(size_t(count()), {.temperature = 0}));
  return logits_;
}

DrawnTokens Slots::step(std::span<const ops::Draw> draws) {
  const at::NoGradGuard no_grad;
  // A captured step reads them where they first were.
  const at::Tensor new_draws = ops::tensor_of(draws);
  if (!draws_.defined()) draws_ = ops::to_device(new_draws, tokens_.device());
  else draws_.copy_(draws_.is_cuda() ? new_draws.pin_memory() : new_draws, /*non_blocking=*/true);
  std::vector<int64_t> positions = state_.rows.read;
  if (state_.rows.on_device.defined()) {
    const int64_t end = std::ranges::max(positions) + 1;
    if (end > state_.rows.capacity) {
      logits_ = drawn_ = at::Tensor();  // in the memory of the graph
      replay_ = nullptr;
      warm_ = false;
      state_.rows.capacity = capacity_for(end);
    }
    for (size_t slot = 0; slot < positions.size(); ++slot)
      if (positions[slot] >= capacities_[slot]) reserve(slot, capacity_for(positions[slot] + 1));
    if (places_changed_) caches_.copy_(ops::to_device(places_, tokens_.device()));
    places_changed_ = false;
  }
  if (can_be_captured_ && warm_) {
    if (!replay_) replay_ = ops::captured(tokens_.device(), [this] { compute(); });
    replay_();
  } else {
    compute();
    warm_ = true;  // tables and libraries are ready
  }
  for (int64_t& position : positions) position += position >= 0;
  state_.rows.read = positions;
  return DrawnTokens(drawn_);
}

// A captured step leaves the new states where the old ones were.
void Slots::compute() {
  std::vector<at::Tensor> before;
  for (const State& layer : state_.layers)
    for (const auto& [name, tensor] : layer.tensors()) before.push_back(tensor);
  const ops::StatesInPlace in_place;
  logits_ = model_.logits(tokens_.unsqueeze(1), state_).squeeze(1).slice(0, 0, count());
  drawn_ = ops::sample(logits_, draws_);
  at::Tensor next = tokens_.slice(0, 0, count());
  at::clamp_min_out(next, drawn_, 0);
  if (!can_be_captured_) return;
  std::map<at::ScalarType, std::array<std::vector<at::Tensor>, 2>> copies;  // to, from
  size_t number = 0;
  for (State& layer : state_.layers)
    for (const auto& [name, tensor] : std::map(layer.tensors())) {
      const at::Tensor& old = layer[name] = before[number++];
      if (tensor.data_ptr() == old.data_ptr()) continue;
      copies[old.scalar_type()][0].push_back(old);
      copies[old.scalar_type()][1].push_back(tensor);
    }
  for (auto& [dtype, both] : copies) at::_foreach_copy_(both[0], both[1]);
}

ModelState Slots::batch() const {
  ModelState out{.layers = {}, .position = state_.rows.read[0]};
  for (size_t i = 0; i < state_.layers.size(); ++i) {
    State& layer = out.layers.emplace_back();
    for (const auto& [name, tensor] : state_.layers[i].tensors())
      layer[name] = tensor.slice(0, 0, count()).clone();
    const std::vector<State>& rows = state_.layers[i].rows.states;
    if (rows.empty()) continue;
    for (const auto& [name, tensor] : rows[0].tensors())
      if (tensor.dim() == 0) layer[name] = at::full({}, out.position, at::kLong);
    for (const Cache& cache : model_.layers[i]->mixer->caches())
      cache.join(std::span(rows).first(size_t(count())), out.position, layer);
  }
  return out;
}

}  // namespace assay::nn
