#pragma once
// The recurrence behind every operator whose state is a matrix per head, by chunks, as batched matrix products.
//   S_t   = diag(decay_t) S_{t−1} + k_t v_tᵀ + b_t (c_t + S_{t−1}ᵀ a_t)ᵀ        [B, H, K, V]
//   out_t = S_tᵀ q_t,   or  (S_{t−1} + diag(u) k_t v_tᵀ)ᵀ q_t  when u is there
// Derivation, FLOPs and times: README.md. docs/operators.md says which operator is which case of it.
#include <ATen/core/Tensor.h>

#include <tuple>

#include "ops/matrix_state/steps.h"

namespace assay::ops {

// [B, T, H, ·], all of one dtype. Undefined: k and v together, c, u; a and b together (no delta rule).
struct MatrixState {
  at::Tensor q;      // [B, T, H, K]
  at::Tensor k, v;   // [B, T, H, K], [B, T, H, V]
  at::Tensor decay;  // [B, T, H, K] or [B, T, H, 1]; in [0, 1] for a state that does not grow, 0 is exact
  at::Tensor a, b;   // [B, T, H, K]
  at::Tensor c;      // [B, T, H, V]
  at::Tensor u;      // [1, 1, H, K]
};

// out [B, T, H, V] and the state after the last step; differentiable through autograd, which keeps O(T) numbers a head
// times K + V + chunk_size. chunk_size: a power of two.
std::tuple<at::Tensor, at::Tensor> chunked(const MatrixState& steps, const at::Tensor& state, int64_t chunk_size);

constexpr int64_t kChunkSize = 64;
// Steps that are worked on at once, by device: few enough to stay in a CPU's cache, many enough to fill a GPU.
int64_t segment_length(const at::Tensor& like);

}  // namespace assay::ops
