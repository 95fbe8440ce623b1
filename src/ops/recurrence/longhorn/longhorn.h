#pragma once
// Longhorn: each channel's state is the closed-form answer of an online regression from keys
// to inputs. Differentiable.
//   β_t = sigmoid(dt_t + dt_bias)      ε_t = β_t / (1 + β_t k_tᵀk_t)           [B, T, Dm]
//   S_t = (1 − ε_t ⊗ k_t²) ⊙ S_{t−1} + (ε_t ⊙ x_t) ⊗ k_t     diagonal     [Liu et al. 2024, Alg. 1]
//   S_t = S_{t−1} (I − ε_t k_t k_tᵀ) + (ε_t ⊙ x_t) ⊗ k_t     exact, before that approximation; per
//                                                            channel
//   y_t = (S_t q_t + D ⊙ x_t) ⊙ silu(z_t)         S_{−1} = initial_state or 0  [B, Dm, N]
//
// x, z [B, T, Dm]; dt [B, T, Dm], or [B, T, 1] for one β of all channels; k, q [B, T, N]; D [Dm];
// dt_bias [Dm] (or [1], as dt has). Every decay lies in [0, 1]. z, D absent: no gate, no skip.
// Returns y in the dtype of x and S_T in float32 (float64 when a sequence is). NaN stays in its
// sequence and in the channels that its argument reaches. Gradients for every tensor, also through
// the state; ValueError naming the argument when shapes, dtypes or devices do not fit.
#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace assay::ops {

std::tuple<at::Tensor, at::Tensor> longhorn(const at::Tensor& x, const at::Tensor& dt,
                                            const at::Tensor& k, const at::Tensor& q,
                                            const std::optional<at::Tensor>& D = {},
                                            const std::optional<at::Tensor>& z = {},
                                            const std::optional<at::Tensor>& dt_bias = {},
                                            bool exact = false,
                                            const std::optional<at::Tensor>& initial_state = {});

// Reference implementation in tensor arithmetic, one step at a time, for any device. It does not
// check its arguments.
std::tuple<at::Tensor, at::Tensor> longhorn_reference(
    const at::Tensor& x, const at::Tensor& dt, const at::Tensor& k, const at::Tensor& q,
    const std::optional<at::Tensor>& D = {}, const std::optional<at::Tensor>& z = {},
    const std::optional<at::Tensor>& dt_bias = {}, bool exact = false,
    const std::optional<at::Tensor>& initial_state = {});

}  // namespace assay::ops
