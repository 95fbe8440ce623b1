#include "nn/cache.h"

#include <torch/torch.h>

#include "ops/parallel.h"

namespace assay::nn {
namespace {

// The first `length` steps of the memory that x begins; no view in the eyes of autograd, so that x
// is its only owner.
at::Tensor first_steps(const at::Tensor& x, int64_t length) {
  const at::AutoDispatchBelowADInplaceOrView plain;
  auto sizes = x.sizes().vec();
  sizes[1] = length;
  return x.as_strided(sizes, x.strides());
}

// Room behind x, in steps, when nobody else holds it: memory of ours begins with x, and one batch
// entry with its room is a stride.
int64_t room(const at::Tensor& x) {
  if (x.use_count() > 1 || x.storage().use_count() > 1 || x.storage_offset() != 0 ||
      x.stride(1) <= 0)
    return 0;
  const int64_t held = int64_t(x.storage().nbytes()) / x.element_size() / x.stride(1) / x.size(0);
  return x.stride(0) == held * x.stride(1) ? held - x.size(1) : 0;
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
  const int64_t length = held.defined() ? held.size(1) : 0, total = length + count;
  if (!held.defined() || room(held) < count) {
    auto sizes = x.sizes().vec();
    sizes[1] = held.defined() ? 2 * total : total;
    const at::Tensor memory = at::empty(sizes, x.options());
    if (held.defined()) first_steps(memory, length).copy_(held);
    held = first_steps(memory, length);
  }
  return held = first_steps(held, total);
}

at::Tensor append_last(State& state, const std::string& name, const at::Tensor& x, int64_t count) {
  const auto past = state.find(name);
  const at::Tensor all = past ? at::cat({*past, x}, 1) : x;
  if (state.last) return all;
  const int64_t kept = std::min(all.size(1), count), dropped = all.size(1) - kept;
  const at::Tensor rest = all.slice(1, dropped);
  state[name] = dropped > kept ? rest.clone() : rest;  // a clone holds these rows alone
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

int64_t length_of(const State& state, const std::string& name) {
  const auto held = state.find(name);
  return held ? held->size(1) : 0;
}

}  // namespace assay::nn
