#pragma once
// Causal depthwise convolution over time, differentiable. Formula and source: kernel.h
// next to this file.
#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace assay::ops {

// x [B, T, Dm]; weight [Dm, K], K ≤ 32 (8 on CUDA); bias [Dm]; activation "none" or "silu";
// initial_state [B, Dm, K−1], the inputs before x, oldest first. Returns y [B, T, Dm] in the dtype
// of x and the last K−1 inputs [B, Dm, K−1] in float32 (float64 when x is). Gradients for every
// tensor, also through the state; ValueError naming the argument when shapes do not fit.
std::tuple<at::Tensor, at::Tensor> causal_conv1d(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias = {},
    std::string_view activation = "none", const std::optional<at::Tensor>& initial_state = {});

// As causal_conv1d, with y in parts along the channels, as views. CUDA reads the gradients of up to
// three parts where they are.
std::pair<std::vector<at::Tensor>, at::Tensor> causal_conv1d_parts(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    std::string_view activation, const std::optional<at::Tensor>& initial_state,
    at::IntArrayRef parts);

// Reference implementation in tensor arithmetic, for any device. It does not check its arguments.
std::tuple<at::Tensor, at::Tensor> causal_conv1d_reference(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias = {},
    std::string_view activation = "none", const std::optional<at::Tensor>& initial_state = {});

}  // namespace assay::ops
