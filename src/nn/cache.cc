#include "nn/cache.h"

#include <torch/torch.h>

#include "ops/core/parallel.h"

namespace assay::nn {
namespace {

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
  if (dropped > kept) return x.slice(1, dropped).clone();
  return at::GradMode::is_enabled() ? x.slice(1, dropped) : steps(x, dropped, kept);
}

// Places in a ring of `size` steps of the last `count` steps before `end`.
at::Tensor ring_places(const at::Tensor& x, int64_t end, int64_t count, int64_t size) {
  return at::arange(end - count, end, x.options().dtype(at::kLong)).remainder(size);
}

}  // namespace

at::Tensor append(State& state, const std::string& name, const at::Tensor& x) {
  if (state.last) {
    const auto past = state.find(name);
    return past ? at::cat({*past, x}, 1) : x;
  }
  if (at::GradMode::is_enabled()) {
    state.appended.insert(name);
    at::Tensor& held = state[name];
    return held = held.defined() ? at::cat({held, x}, 1) : x;
  }
  const int64_t length = length_of(state, name);
  const at::Tensor all = grow(state, name, x, x.size(1));
  all.slice(1, length).copy_(x);
  return all;
}

at::Tensor grow(State& state, const std::string& name, const at::Tensor& x, int64_t count) {
  state.appended.insert(name);
  at::Tensor& held = state[name];
  const int64_t length = held.defined() ? held.size(1) : 0;
  const int64_t total = length + count;
  if (!held.defined() || room(held) < count)
    held = moved(held, x, held.defined() ? count + total : count);
  return held = steps(held, 0, total);
}

at::Tensor reserve(State& state, const std::string& name, int64_t capacity) {
  at::Tensor& held = state[name];
  return held = steps(moved(held, held, capacity - held.size(1)), 0, capacity);
}

at::Tensor with_room(const at::Tensor& x, int64_t batch, int64_t capacity) {
  auto sizes = x.sizes().vec();
  sizes[0] = batch;
  sizes[1] = capacity;
  return steps(at::empty(sizes, x.options()), 0, x.size(1));
}

at::Tensor to_ring(const at::Tensor& x, int64_t end, int64_t size) {
  auto sizes = x.sizes().vec();
  sizes[1] = size;
  return at::empty(sizes, x.options()).index_copy_(1, ring_places(x, end, x.size(1), size), x);
}

at::Tensor from_ring(const at::Tensor& ring, int64_t end, int64_t count) {
  return ring.index_select(1, ring_places(ring, end, count, ring.size(1)));
}

at::Tensor append_last(State& state, const std::string& name, const at::Tensor& x, int64_t count) {
  if (state.last || at::GradMode::is_enabled()) {
    const auto past = state.find(name);
    const at::Tensor all = past ? at::cat({*past, x}, 1) : x;
    if (!state.last) state[name] = last_steps(all, count);
    return all;
  }
  at::Tensor& held = state[name];
  const int64_t length = held.defined() ? held.size(1) : 0;
  if (!held.defined() || room(held) < x.size(1)) held = moved(held, x, x.size(1) + count);
  const at::Tensor all = steps(held, 0, length + x.size(1));
  all.slice(1, length).copy_(x);
  held = last_steps(all, count);
  return all;
}

void for_each_row(const State& state, const c10::Device& device,
                  const std::function<void(int64_t b)>& body) {
  const auto part = [&](int64_t begin, int64_t end) {
    const at::NoGradGuard no_grad;  // of this thread
    for (int64_t b = begin; b < end; ++b)
      if (state.positions[size_t(b)] >= 0) body(b);
  };
  const auto count = int64_t(state.positions.size());
  if (device.is_cpu()) ops::at_parallel_for()(count, 1, part);
  else part(0, count);
}

at::Tensor once_for_steps(State& state, const std::function<at::Tensor()>& make) {
  if (!state.device_positions.defined()) return make();
  if (state.read_by_graph.empty()) state.read_by_graph = {make()};
  return state.read_by_graph[0];
}

int64_t length_of(const State& state, const std::string& name) {
  const auto held = state.find(name);
  return held ? held->size(1) : 0;
}

}  // namespace assay::nn
