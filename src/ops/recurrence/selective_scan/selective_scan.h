#pragma once
// Selective scan (Mamba-1), differentiable. Formula, shapes and source: kernel.h in this folder.
#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace assay::ops {

// u, delta, z [B, T, Dm]; A [Dm, N] negative, N ≤ 256; or A [B, T, N], read from the token and
// shared by the channels [Liu et al. 2024, §5]: channel_scan, G is 1; B, C [B, T, G, N], G
// divides Dm; D, delta_bias [Dm];
// initial_state [B, Dm, N]. Returns y [B, T, Dm] in the dtype of u and the state after the last
// step [B, Dm, N] in float32 (float64 when anything of u, delta, B, C, z is). Sequences may be
// bfloat16 while A, D, delta_bias are float32. Gradients for every tensor, also through the state;
// ValueError naming the argument when shapes do not fit.
std::tuple<at::Tensor, at::Tensor> selective_scan(
    const at::Tensor& u, const at::Tensor& delta, const at::Tensor& A, const at::Tensor& B,
    const at::Tensor& C, const std::optional<at::Tensor>& D = {},
    const std::optional<at::Tensor>& z = {}, const std::optional<at::Tensor>& delta_bias = {},
    bool delta_softplus = false, const std::optional<at::Tensor>& initial_state = {});

// Reference implementation in tensor arithmetic, one step at a time, for any device. It does not
// check its arguments.
std::tuple<at::Tensor, at::Tensor> selective_scan_reference(
    const at::Tensor& u, const at::Tensor& delta, const at::Tensor& A, const at::Tensor& B,
    const at::Tensor& C, const std::optional<at::Tensor>& D = {},
    const std::optional<at::Tensor>& z = {}, const std::optional<at::Tensor>& delta_bias = {},
    bool delta_softplus = false, const std::optional<at::Tensor>& initial_state = {});

}  // namespace assay::ops
