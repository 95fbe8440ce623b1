#pragma once
// Mamba-1's recurrence with a decay that is read from the token too.                            [Liu et al. 2024, §5]
//   S_t = exp(−Δ_t ⊗ A_t) ⊙ S_{t−1} + (Δ_t ⊙ x_t) ⊗ B_t     y_t = S_t C_t     S_{−1} = state or 0
// Composed of tensor arithmetic, any device: pieces of 64 tokens, in each a prefix over (decay, input) pairs in six
// doublings, recomputed in the backward, so that no [T, Dm, N] stays in memory. Nothing is divided.
#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace assay::nn {

// x, delta [B, T, Dm]; A, B, C [B, T, N], delta and A not negative; state [B, Dm, N]. Returns y [B, T, Dm] in the dtype
// of x, and S_T in float32 (float64 when x is). Differentiable in every tensor.
std::tuple<at::Tensor, at::Tensor> learned_decay_scan(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& A,
                                                      const at::Tensor& B, const at::Tensor& C,
                                                      const std::optional<at::Tensor>& state = {});

}  // namespace assay::nn
