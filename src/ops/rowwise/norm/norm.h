#pragma once
// Root-mean-square norm and layer norm, differentiable. Formulas and sources: kernel.h
// next to this file.
#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

namespace assay::ops {

// x [..., D] (fp32, fp64, bf16), weight and bias [D] (fp32; fp64 for fp64) → the dtype of x. Each
// of `groups` equal parts of a row (each head) is normalised by itself. ValueError naming the
// argument when a shape does not fit.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, int64_t groups = 1);
at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      double eps, int64_t groups = 1);
// x + y and its norm: rms_norm, or layer_norm with a bias. One kernel each way on CUDA if x and y
// have one shape and dtype. The sum is rounded before the norm; the gradient is rounded once.
std::pair<at::Tensor, at::Tensor> add_norm(const at::Tensor& x, const at::Tensor& y,
                                           const at::Tensor& weight,
                                           const std::optional<at::Tensor>& bias, double eps,
                                           int64_t groups = 1);

// Reference implementations in plain tensor arithmetic.
at::Tensor rms_norm_reference(const at::Tensor& x, const at::Tensor& weight, double eps,
                              int64_t groups = 1);
at::Tensor layer_norm_reference(const at::Tensor& x, const at::Tensor& weight,
                                const at::Tensor& bias, double eps, int64_t groups = 1);

}  // namespace assay::ops
