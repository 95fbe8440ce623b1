#pragma once
// Top-1 Element attention from tensor arithmetic in O(T) memory, for devices without a kernel:
// blocks of queries, their scores computed again in the backward.
#include <ATen/core/Tensor.h>

#include <tuple>

namespace assay::ops {

struct Top1ElementOutputs {
  // [B, T, H, D], [B, H, T]
  at::Tensor out;
  at::Tensor index;
  // [B, H, T], [B, H, T, D] real: see kernel.h; soft undefined when no gradient is wanted
  at::Tensor logsumexp;
  at::Tensor soft;
};

// q [B, T, H, D]; k, v [B, S, Hk, D], of one dtype.
Top1ElementOutputs top1_element_composed(const at::Tensor& q, const at::Tensor& k,
                                         const at::Tensor& v, double scale, bool with_gradient);
std::tuple<at::Tensor, at::Tensor, at::Tensor> top1_element_composed_backward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
    const Top1ElementOutputs& outputs, const at::Tensor& dout);

}  // namespace assay::ops
