#pragma once
// Top-1 Element attention, differentiable. Formula, shapes and source: kernel.h in this folder.
#include <ATen/core/Tensor.h>

#include <tuple>

namespace assay::ops {

// q [B, T, H, D]; k, v [B, S, Hk, D], S ≥ T: the queries are the last T of S positions. Hk divides
// H. Returns out [B, T, H, D] in the dtype of q and the position read, index [B, H, T] int64.
// Gradients for q, k, v, straight-through. float64, float32, bfloat16. ValueError naming the
// argument when a shape, dtype or value does not fit.
std::tuple<at::Tensor, at::Tensor> top1_element(const at::Tensor& q, const at::Tensor& k,
                                                const at::Tensor& v, double scale);

// Reference implementation in tensor arithmetic with [T, S] matrices, for any device. It does not
// check its arguments.
std::tuple<at::Tensor, at::Tensor> top1_element_reference(const at::Tensor& q, const at::Tensor& k,
                                                          const at::Tensor& v, double scale);

}  // namespace assay::ops
