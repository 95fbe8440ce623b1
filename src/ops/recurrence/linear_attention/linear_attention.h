#pragma once
// Linear attention with a decaying matrix as state, differentiable.
//   S_{−1} = initial_state or 0  [B, H, K, V]; out_t = scale · S_tᵀ q_t except in rwkv5 and rwkv6
//   linear_attention  S_t = S_{t−1} + k_t v_tᵀ                                 [Katharopoulos 2020]
//   simple_gla        S_t = exp(g_t) S_{t−1} + k_t v_tᵀ        g [B, T, H]     [RetNet, Mamba-2]
//   gla               S_t = diag(exp gk_t) S_{t−1} + k_t v_tᵀ  gk [B, T, H, K] [Yang et al. 2023]
//   rwkv5, rwkv6      S_t = diag(exp w_t) S_{t−1} + k_t v_tᵀ                   [Peng et al. 2024]
//                     out_t = scale · (S_{t−1} + diag(u) k_t v_tᵀ)ᵀ r_t
//                     w [H, K] (rwkv5) or [B, T, H, K] (rwkv6); u [H, K]
// Retention is simple_gla with g = ln γ_h everywhere.
//
// q, k, r [B, T, ·, K], v [B, T, ·, V]: each may have fewer heads than the others, where its number
// divides the largest, H; head h reads head ⌊h / (H/G)⌋ of a tensor with G. Gates and states have
// H. Returns out [B, T, H, V] in the dtype of q and S_T in float32 (float64 when a sequence is). g,
// gk, w are log decays: not above 0, which is not checked: a positive one grows the state, to
// infinity in the end, as the formula says; −∞ forgets everything before. NaN may reach every
// output of its sequence and head but those of earlier chunks (on the CPU: of earlier steps).
// Gradients for every tensor, also through the state; ValueError naming the argument when shapes,
// dtypes or devices do not fit.
#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace assay::ops {

using OutputAndState = std::tuple<at::Tensor, at::Tensor>;

OutputAndState linear_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                double scale, const std::optional<at::Tensor>& initial_state = {});
OutputAndState simple_gla(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& g, double scale,
                          const std::optional<at::Tensor>& initial_state = {});
OutputAndState gla(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const at::Tensor& gk, double scale,
                   const std::optional<at::Tensor>& initial_state = {});
OutputAndState rwkv5(const at::Tensor& r, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& w, const at::Tensor& u, double scale,
                     const std::optional<at::Tensor>& initial_state = {});
OutputAndState rwkv6(const at::Tensor& r, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& w, const at::Tensor& u, double scale,
                     const std::optional<at::Tensor>& initial_state = {});

// Reference implementations in tensor arithmetic, one step at a time, for any device. They do not
// check their arguments. gla_reference takes decays [B, T, H, K] or [B, T, H, 1], so it is also the
// reference of simple_gla.
OutputAndState gla_reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const at::Tensor& gk, double scale,
                             const std::optional<at::Tensor>& initial_state = {});
OutputAndState rwkv6_reference(const at::Tensor& r, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& w, const at::Tensor& u, double scale,
                               const std::optional<at::Tensor>& initial_state = {});

}  // namespace assay::ops
