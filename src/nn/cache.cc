#include "nn/cache.h"

#include <torch/torch.h>

#include "ops/attention/decode_attention/decode_attention.h"
#include "ops/core/parallel.h"

namespace assay::nn {
namespace {

constexpr int64_t kAll = INT64_MAX;  // steps that a cache keeps

// `length` steps of the memory of x, from its step `begin`; no view in the eyes of autograd, so
// that x is its only owner.
at::Tensor steps(const at::Tensor& x, int64_t begin, int64_t length) {
  const at::AutoDispatchBelowADInplaceOrView plain;
  auto sizes = x.sizes().vec();
  sizes[1] = length;
  return x.as_strided(sizes, x.strides(), x.storage_offset() + begin * x.stride(1));
}

// Room behind x, in steps, when nobody else holds it: the memory is ours, and one batch entry with
// its room is a stride.
int64_t room(const at::Tensor& x) {
  if (x.use_count() > 1 || x.storage().use_count() > 1 || x.stride(1) <= 0) return 0;
  const int64_t held = int64_t(x.storage().nbytes()) / x.element_size() / x.stride(1) / x.size(0);
  if (x.stride(0) != held * x.stride(1)) return 0;
  return held - x.storage_offset() / x.stride(1) - x.size(1);
}

// Memory for `held` and `more` steps like those of x, which begins with what `held` has.
at::Tensor moved(const at::Tensor& held, const at::Tensor& x, int64_t more) {
  const int64_t length = held.defined() ? held.size(1) : 0;
  auto sizes = x.sizes().vec();
  sizes[1] = length + more;
  const at::Tensor memory = at::empty(sizes, x.options());
  if (length > 0) steps(memory, 0, length).copy_(held);
  return steps(memory, 0, length);
}

// The last `count` steps of x or fewer: a part of its memory, or a copy if most of it is dropped.
at::Tensor last_steps(const at::Tensor& x, int64_t count) {
  const int64_t kept = std::min(x.size(1), count);
  const int64_t dropped = x.size(1) - kept;
  if (dropped == 0) return x;
  if (dropped > kept) return x.slice(1, dropped).clone();
  return at::GradMode::is_enabled() ? x.slice(1, dropped) : steps(x, dropped, kept);
}

// Places in a ring of `size` steps of the last `count` steps before `end`.
at::Tensor ring_places(const at::Tensor& x, int64_t end, int64_t count, int64_t size) {
  return at::arange(end - count, end, x.options().dtype(at::kLong)).remainder(size);
}

}  // namespace

Cache::Cache(std::string name, CacheOptions options)
    : name_(std::move(name)), options_(std::move(options)) {}

int64_t Cache::length(const State& state) const {
  const auto held = state.find(name_);
  return held ? held->size(1) : 0;
}

at::Tensor Cache::append(State& state, const at::Tensor& x) const {
  return append(state, x, window() > 0 ? window() - 1 : kAll);
}

at::Tensor Cache::append(State& state, const at::Tensor& x, int64_t count) const {
  const bool last = state.context.last;
  if (count == kAll && !last) state.set_grows(name_);
  if (last || at::GradMode::is_enabled()) {
    const auto past = state.find(name_);
    const at::Tensor all = past ? at::cat({*past, x}, 1) : x;
    if (!last) state[name_] = last_steps(all, count);
    return all;
  }
  const int64_t past = length(state);
  const at::Tensor all = extended(state, x, count);
  all.slice(1, past).copy_(x);
  state[name_] = last_steps(all, count);
  return all;
}

at::Tensor Cache::grow(State& state, const at::Tensor& x) const {
  if (window() > 0) return append(state, x);
  state.set_grows(name_);
  return state[name_] = extended(state, x, kAll);
}

// The steps that the state holds, and memory for x behind them. The state has its steps there, too.
at::Tensor Cache::extended(State& state, const at::Tensor& x, int64_t kept) const {
  at::Tensor& held = state[name_];
  const int64_t past = held.defined() ? held.size(1) : 0;
  const int64_t later = kept < kAll ? kept : held.defined() ? past + x.size(1) : 0;
  if (!held.defined() || room(held) < x.size(1)) held = moved(held, x, x.size(1) + later);
  return steps(held, 0, past + x.size(1));
}

at::Tensor Cache::held(const State& row) const {
  const auto found = row.find(name_);
  return found ? *found : options_.empty(row);
}

at::Tensor Cache::reserve(State& row, int64_t position, int64_t capacity) const {
  const at::Tensor past = held(row);
  at::Tensor& own = row[name_];
  if (window() == 0) {
    const int64_t size = capacity / tokens();
    return own = steps(moved(past, past, size - past.size(1)), 0, size);
  }
  const int64_t size = ops::ring_size(window());
  if (past.size(1) == size) return own;
  auto sizes = past.sizes().vec();
  sizes[1] = size;
  own = at::empty(sizes, past.options());
  return own.index_copy_(1, ring_places(past, position, past.size(1), size), past);
}

void Cache::join(std::span<const State> rows, int64_t position, State& batch) const {
  if (position < tokens()) return;
  std::vector<at::Tensor> parts;
  for (const State& row : rows) {
    const at::Tensor all = held(row);
    const int64_t count = std::min(position, window() - 1);
    parts.push_back(window() == 0
                        ? all.slice(1, 0, position / tokens())
                        : all.index_select(1, ring_places(all, position, count, all.size(1))));
  }
  batch[name_] = at::cat(parts);
  if (window() == 0) batch.set_grows(name_);
}

at::Tensor with_room(const at::Tensor& x, int64_t batch, int64_t capacity) {
  auto sizes = x.sizes().vec();
  sizes[0] = batch;
  sizes[1] = capacity;
  return steps(at::empty(sizes, x.options()), 0, x.size(1));
}

void for_each_row(const State& state, const c10::Device& device,
                  const std::function<void(int64_t b)>& body) {
  const auto part = [&](int64_t begin, int64_t end) {
    const at::NoGradGuard no_grad;  // of this thread
    for (int64_t b = begin; b < end; ++b)
      if (state.context.rows.used(b)) body(b);
  };
  const auto count = int64_t(state.rows.states.size());
  if (device.is_cpu()) ops::at_parallel_for()(count, 1, part);
  else part(0, count);
}

at::Tensor once_for_steps(State& state, const std::function<at::Tensor()>& make) {
  if (!state.context.rows.on_device.defined()) return make();
  std::vector<at::Tensor>& kept = state.rows.read_by_graph;
  if (kept.empty()) kept = {make()};
  return kept[0];
}

}  // namespace assay::nn
