#pragma once
// Matrix products of layers, differentiable, through the library that is fastest where they run.
#include <ATen/core/Tensor.h>

namespace assay::ops {

// x [..., K], weight [N, K], bias [N] or undefined, all of one dtype → x Wᵀ + b, [..., N].
// ValueError when shapes do not fit. The path depends on device, dtype and the number of rows of x
// (README.md next to this file). Everything that the CPU paths do not serve is at::linear.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);
// a [M, K] bᵀ, b [N, K] → [M, N]; no gradient.
at::Tensor product(const at::Tensor& a, const at::Tensor& b);

}  // namespace assay::ops
