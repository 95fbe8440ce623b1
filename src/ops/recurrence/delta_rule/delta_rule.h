#pragma once
// Delta rules: the state forgets what it held under a key before it stores the
// new value. Differentiable.
//   delta_rule        S_t = S_{t−1} + k_t β_t (v_t − S_{t−1}ᵀ k_t)ᵀ              [Yang et al. 2024]
//   gated_delta_rule  S_t = S' + k_t β_t (v_t − S'ᵀ k_t)ᵀ, S' = exp(g_t) S_{t−1} [Yang et al. 2025]
//   rwkv7             S_t = diag(exp w_t) S_{t−1} + b_t (S_{t−1}ᵀ a_t)ᵀ + k_t v_tᵀ     [Peng 2025]
//   out_t = scale · S_tᵀ q_t (rwkv7 calls q r)        S_{−1} = initial_state or 0      [B, H, K, V]
// rwkv7 is the general one (diagonal plus low rank): its a reads the state before the decay. RWKV-7
// itself has scale 1.
//
// q, k [B, T, ·, K], v [B, T, ·, V] and heads as in linear_attention.h; beta, g [B, T, H]; r, w, k,
// a, b of rwkv7 [B, T, H, K], v [B, T, H, V]. g, w are log decays; not above 0, which is not
// checked. Returns out [B, T, H, V] in the dtype of q and S_T in float32 (float64 when a sequence
// is). Nothing is normalised here: with β‖k‖² or −aᵀb beyond 2 the state grows. NaN, gradients and
// errors as in linear_attention.h.
#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace assay::ops {

std::tuple<at::Tensor, at::Tensor> delta_rule(const at::Tensor& q, const at::Tensor& k,
                                              const at::Tensor& v, const at::Tensor& beta,
                                              double scale,
                                              const std::optional<at::Tensor>& initial_state = {});
std::tuple<at::Tensor, at::Tensor> gated_delta_rule(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
    const at::Tensor& beta, double scale, const std::optional<at::Tensor>& initial_state = {});
std::tuple<at::Tensor, at::Tensor> rwkv7(const at::Tensor& r, const at::Tensor& w,
                                         const at::Tensor& k, const at::Tensor& v,
                                         const at::Tensor& a, const at::Tensor& b, double scale,
                                         const std::optional<at::Tensor>& initial_state = {});

// Reference implementations in tensor arithmetic, one step at a time, for any device. They do not
// check their arguments.
std::tuple<at::Tensor, at::Tensor> gated_delta_rule_reference(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
    const at::Tensor& beta, double scale, const std::optional<at::Tensor>& initial_state = {});
std::tuple<at::Tensor, at::Tensor> rwkv7_reference(
    const at::Tensor& r, const at::Tensor& w, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& a, const at::Tensor& b, double scale,
    const std::optional<at::Tensor>& initial_state = {});

}  // namespace assay::ops
