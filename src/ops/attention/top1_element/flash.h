#pragma once
// Top-1 Element attention in bfloat16 on GPUs other than Hopper: the choice and dv by kernels for
// compute_80, the softmax and its gradients by torch's FlashAttention-2.
#include "ops/attention/top1_element/composed.h"

namespace assay::ops {

// Why the functions below do not serve these tensors, or null.
const char* why_no_flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

// As those of composed.h; `soft` is [B, T, H, D] in bfloat16. Memory O(T).
Top1ElementOutputs top1_element_flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      double scale, bool with_gradient);
std::tuple<at::Tensor, at::Tensor, at::Tensor> top1_element_flash_backward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
    const Top1ElementOutputs& outputs, const at::Tensor& dout);

}  // namespace assay::ops
