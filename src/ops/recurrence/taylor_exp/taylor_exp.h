#pragma once
// Attention with the exponential's second-order Taylor series in place of softmax, differentiable.
// [Arora et al. 2024]
//   s_tj  = scale · q_tᵀ k_j            w_tj = 1 + s_tj + s_tj²/2   for j ≤ t
//   out_t = Σ_j w_tj v_j / (Σ_j w_tj + eps)                    normalize; else without the division
// w = φ(q)ᵀ φ(k) of finitely many features, so it is linear attention, with a state of fixed size:
//   φ(x)  = (1, x_i, x_i x_j for i ≤ j)   [F = 1 + K + K(K+1)/2]   queries: with scale and weights
//   S_t   = S_{t−1} + φ(k_t) (v_t, 1)ᵀ    [B, H, F, V + 1]         last column: the denominators
//
// q, k [B, T, ·, K], v [B, T, ·, V] and heads as in linear_attention.h; initial_state [B, H, F, V +
// 1]. w ≥ ½, so the denominator is positive; where bf16 rounds the features (CUDA, more than 8
// steps) each of the products that w sums is off by 2^−8, and long queries and keys may bring a
// small w below 0. Returns out [B, T, H, V] in the dtype of q and S_T in float32 (float64 when a
// sequence is). NaN, gradients and errors as in linear_attention.h. Based's repository has eps
// 1e-12, others 1e-6.
#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace assay::ops {

std::tuple<at::Tensor, at::Tensor> taylor_exp_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale, bool normalize,
    double eps, const std::optional<at::Tensor>& initial_state = {});

// x [..., K], at least two dimensions → [..., F]: the features above, those of second order row by
// row of i ≤ j.
at::Tensor taylor_exp_features(const at::Tensor& x);
// The weights [F] that a query's features carry: φ(x)ᵀ (weights ⊙ φ(y)) = 1 + s + s²/2, s =
// scale · xᵀy.
at::Tensor taylor_exp_weights(int64_t key_dim, double scale, const at::TensorOptions& options);

// Reference implementation in tensor arithmetic, one step at a time, for any device. It does not
// check its arguments.
std::tuple<at::Tensor, at::Tensor> taylor_exp_attention_reference(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale, bool normalize,
    double eps, const std::optional<at::Tensor>& initial_state = {});

}  // namespace assay::ops
