#pragma once
// State space duality, the recurrence of Mamba-2, differentiable.           [Dao & Gu 2024, §6, §7]
//   Δ_t = softplus(dt_t + dt_bias)         (or dt_t + dt_bias)      [B, T, H]
//   S_t = exp(Δ_t A) S_{t−1} + Δ_t x_t B_tᵀ             [B, H, P, N];   S_{−1} = initial_state or 0
//   y_t = (S_t C_t + D x_t) ⊙ silu(z_t)    z, D absent: no gate, no skip
// It is simple_gla with q = C, k = B, v = Δ x, g = Δ A, scale 1 and the state transposed.
//
// x, z [B, T, H, P]; dt [B, T, H]; A [H], not above 0 (not checked); B, C [B, T, G, N], G divides
// H, head h reads group ⌊h / (H/G)⌋; D, dt_bias [H]; initial_state [B, H, P, N]. chunk_size ≥ 1
// changes the speed, never the result beyond rounding. Returns y in the dtype of x and S_T in
// float32 (float64 when a sequence is). NaN, gradients and errors as in linear_attention.h.
#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace assay::ops {

std::tuple<at::Tensor, at::Tensor> ssd(const at::Tensor& x, const at::Tensor& dt,
                                       const at::Tensor& A, const at::Tensor& B,
                                       const at::Tensor& C, const std::optional<at::Tensor>& D = {},
                                       const std::optional<at::Tensor>& z = {},
                                       const std::optional<at::Tensor>& dt_bias = {},
                                       bool dt_softplus = false,
                                       const std::optional<at::Tensor>& initial_state = {},
                                       int64_t chunk_size = 64);

// Reference implementation in tensor arithmetic, one step at a time, for any device. It does not
// check its arguments.
std::tuple<at::Tensor, at::Tensor> ssd_reference(
    const at::Tensor& x, const at::Tensor& dt, const at::Tensor& A, const at::Tensor& B,
    const at::Tensor& C, const std::optional<at::Tensor>& D = {},
    const std::optional<at::Tensor>& z = {}, const std::optional<at::Tensor>& dt_bias = {},
    bool dt_softplus = false, const std::optional<at::Tensor>& initial_state = {});

}  // namespace assay::ops
