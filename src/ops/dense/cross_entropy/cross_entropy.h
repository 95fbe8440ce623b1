#pragma once
// Softmax cross-entropy over rows of logits. Formula: kernel.h in this folder.
#include <ATen/core/Tensor.h>

namespace assay::ops {

// logits [N, V] (fp32, fp64, bf16; contiguous), targets [N] i64 in [0, V) → losses [N], fp32
// (fp64 for fp64).
// Not differentiable: the loss of the language model calls it on its way forward.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets);
// As cross_entropy; logits become scale · ∂(Σ losses)/∂logits, in place.
at::Tensor cross_entropy_(const at::Tensor& logits, const at::Tensor& targets, double scale);

// cross_entropy from tensor arithmetic: defines what is right.
at::Tensor cross_entropy_reference(const at::Tensor& logits, const at::Tensor& targets);

}  // namespace assay::ops
