#pragma once
// Code shared by the operators with a matrix as state: checks of their arguments, heads, and the
// loop of their references.
#include <ATen/core/Tensor.h>

#include <functional>
#include <initializer_list>
#include <tuple>
#include <utility>

#include "ops/core/tensors.h"

namespace assay::ops {

// Sizes of q, k [B, T, ·, K] and v [B, T, ·, V]; H is the largest number of heads among them.
struct HeadShape {
  int64_t batch;
  int64_t time;
  int64_t heads;
  int64_t key_dim;
  int64_t value_dim;
  const char* query;  // the op's name for q
};

// ValueError naming the argument unless the shapes fit, the heads of each divide H and `scale` is
// finite. `query`: what the op calls q.
HeadShape check_heads(const char* op, const char* query, const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& v, double scale);
// A gate [B, T, H, ·] or, with last = 0, [B, T, H]; and a state [B, H, K, V] when there is one.
void check_gate(const char* op, const char* argument, const at::Tensor& gate,
                const HeadShape& shape, const at::Tensor& like, int64_t last = 0);
void check_state(const char* op, const OptionalTensor& initial_state, const HeadShape& shape,
                 const at::Tensor& like);

// x [B, T, G, ·] with each head repeated consecutively until there are `heads`; head h is head ⌊h /
// (heads/G)⌋ of x.
at::Tensor with_heads(const at::Tensor& x, int64_t heads);

// The state before the first step: initial_state in `real`, or zeros of `shape` on the
// device of `like`.
at::Tensor first_state(const OptionalTensor& initial_state, at::IntArrayRef shape,
                       at::ScalarType real, const at::Tensor& like);

// (out [B, T, …], final state) of out_t, S_t = step(t, S_{t−1}) for t = 0 … time − 1. Defines
// what is right.
using Step = std::function<std::pair<at::Tensor, at::Tensor>(int64_t t, const at::Tensor& state)>;
std::tuple<at::Tensor, at::Tensor> step_by_step(int64_t time, at::Tensor state, const Step& step);

// Products of one step: the vector (…, K) read from a state (…, K, V), and what k ⊗ v adds to one.
at::Tensor read_state(const at::Tensor& state, const at::Tensor& q);
at::Tensor outer_product(const at::Tensor& k, const at::Tensor& v);

}  // namespace assay::ops
