#pragma once
// Tensors of a state that grow by the tokens read.
#include <ATen/ops/zeros_like.h>

#include <array>
#include <functional>
#include <span>
#include <string>

#include "nn/state.h"

namespace assay::nn {

struct CacheOptions {
  int64_t window = 0;  // tokens that a query sees, its own included; 0: all
  int64_t tokens = 1;  // for which there is one step
  // The cache of a state that has read too few tokens for a step. For decode kernels alone.
  std::function<at::Tensor(const State&)> empty = {};
};

// A tensor [B, steps, …] of a state that grows along time: all steps, or those of a window before
// the next token. Only this class and nn/slots.h know how it is stored.
//
// Without gradients room is kept for as much again, so a token costs its own bytes, not those of
// its past. Copies of a state share memory until one of them grows (copy on write). With gradients
// everything is copied. The steps of a last piece are not kept.
class Cache {
 public:
  explicit Cache(std::string name, CacheOptions options = {});

  // The steps that the state holds, and x [B, T, …] behind them.
  at::Tensor append(State& state, const at::Tensor& x) const;
  // As append, but the state keeps the last `count` steps only.
  at::Tensor append(State& state, const at::Tensor& x, int64_t count) const;
  // As append without gradients, for a kernel that writes the steps of x itself.
  at::Tensor grow(State& state, const at::Tensor& x) const;
  int64_t length(const State& state) const;  // steps that the state holds

  const std::string& name() const { return name_; }
  int64_t window() const { return options_.window; }
  int64_t tokens() const { return options_.tokens; }

  // For rows of nn/slots.h whose caches are read by a kernel. A row that has read `position` tokens
  // gets memory for `capacity` tokens, or the ring of a window, where the step of token j is at j
  // mod its size. The state holds all of it; the new steps are not initialised.
  at::Tensor reserve(State& row, int64_t position, int64_t capacity) const;
  at::Tensor held(const State& row) const;  // before that; not undefined
  // Puts the steps of such rows into the state of one batch. All have read `position` tokens.
  void join(std::span<const State> rows, int64_t position, State& batch) const;

 private:
  at::Tensor extended(State& state, const at::Tensor& x, int64_t kept) const;
  std::string name_;
  CacheOptions options_;
};

// Memory for `capacity` steps like those of x [B, T, …] in `batch` sequences. It shows T steps, not
// initialised; a cache appends to the others.
at::Tensor with_room(const at::Tensor& x, int64_t batch, int64_t capacity);

// make(), of parameters alone. The steps of a batch of nn/slots.h on CUDA compute it once.
at::Tensor once_for_steps(State& state, const std::function<at::Tensor()>& make);

// body(b) for each used row b of a batch with State::Rows::states, on the CPU side by side: its
// calls are too small to be divided among threads.
void for_each_row(const State& state, const c10::Device& device,
                  const std::function<void(int64_t b)>& body);

// body(heads, state) of tensors [B, T, …]; a tensor like the first of them. Rows at positions of
// their own lie along time: body(part [1, 1, …], state) for each, and 0 for unused ones.
template <size_t N, class Body>
at::Tensor by_sequence(const std::array<at::Tensor, N>& heads, State& state, const Body& body) {
  if (state.context.rows.empty()) return body(heads, state);
  const at::Tensor out = at::zeros_like(heads[0]);
  for_each_row(state, out.device(), [&](int64_t b) {
    std::array<at::Tensor, N> own;
    for (size_t i = 0; i < N; ++i) own[i] = heads[i].slice(1, b, b + 1);
    out.slice(1, b, b + 1).copy_(body(own, state.rows.states[size_t(b)]));
  });
  return out;
}

}  // namespace assay::nn
