#pragma once
// Root-mean-square norm, differentiable. Formula and source: kernel.h beside this file.
#include <ATen/core/Tensor.h>

namespace assay::ops {

// x [..., D] (fp32, fp64, bf16), weight [D] (fp32; fp64 for fp64) → x / sqrt(mean x² + eps) ⊙ weight, dtype of x.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
at::Tensor rms_norm_reference(const at::Tensor& x, const at::Tensor& weight, double eps);  // defines what is right

}  // namespace assay::ops
