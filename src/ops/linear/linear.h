#pragma once
// Matrix products of layers, differentiable, through the library that is fastest where they run.
#include <ATen/core/Tensor.h>

namespace assay::ops {

// x [..., K], weight [N, K], bias [N] or undefined, all of one dtype → x Wᵀ + b, [..., N].
// On the CPU in float32 x Wᵀ and the gradient of x go through oneDNN, which is faster than the BLAS
// that torch calls by itself (README.md next to this file). Everything else is at::linear.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);
// a [M, K] bᵀ, b [N, K] → [M, N]; no gradient.
at::Tensor product(const at::Tensor& a, const at::Tensor& b);

}  // namespace assay::ops
