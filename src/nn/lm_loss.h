#pragma once
// The head and the cross-entropy in one, a few rows of logits at a time, so that [T, V] never
// stands in memory.
#include <ATen/core/Tensor.h>

namespace assay::nn {

// mean_i −ln softmax(W h_i)[target_i].
//     hidden [N, d] (fp32, fp64, bf16), weight [V, d] (cast to hidden's dtype),
// targets [N] i64 → scalar fp32 (fp64 for fp64). The gradients are computed on the way forward,
// from the same logits.
at::Tensor lm_loss(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets);

struct TokenScores {
  at::Tensor losses;  // the terms of that mean, [N] fp32 (fp64 for fp64)
  at::Tensor greedy;  // whether the target is the likeliest, [N] bool; undefined if not asked for
};
// No gradient. `weight` is at rest (ops/dense/linear/linear.h), as the weight of a model is.
TokenScores score_tokens(const at::Tensor& hidden, const at::Tensor& weight,
                         const at::Tensor& targets, bool greedy = false);

}  // namespace assay::nn
