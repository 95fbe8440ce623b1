#pragma once
// The inputs of a delta rule with a decay per channel, as ops::rwkv7 takes them, differentiable.
// Formulas: kernel.h in this folder.
#include <ATen/core/Tensor.h>

namespace assay::ops {

// Sequences q, k, f and e have one shape [..., D] (fp32, fp64, bf16), and results have their dtype;
// beta is [..., heads]; bias [D] and rate [heads] are parameters (fp32; fp64 for fp64). D is
// `heads` equal parts. ValueError naming the argument when a shape does not fit. The references are
// plain tensor arithmetic and define the results.
struct DeltaRuleInputs {
  // g in fp32 (fp64 for fp64)
  at::Tensor log_decay;
  at::Tensor q;
  at::Tensor written;
  at::Tensor removed;
};
// g = −rate softplus(f + bias), or with bound < 0: bound σ(rate (f + bias)). Written is β k̂, and
// removed −exp(g) k̂, with q̂ and k̂ of unit length per head.
DeltaRuleInputs kda_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& f,
                           const at::Tensor& beta, const at::Tensor& bias, const at::Tensor& rate,
                           double bound, int64_t heads);
DeltaRuleInputs kda_inputs_reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& f,
                                     const at::Tensor& beta, const at::Tensor& bias,
                                     const at::Tensor& rate, double bound, int64_t heads);
// g = −rate softplus(f + bias). Written is k̂, and removed −scale σ(e) exp(g) k̂.
DeltaRuleInputs gdn2_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& f,
                            const at::Tensor& e, const at::Tensor& bias, const at::Tensor& rate,
                            double scale, int64_t heads);
DeltaRuleInputs gdn2_inputs_reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& f,
                                      const at::Tensor& e, const at::Tensor& bias,
                                      const at::Tensor& rate, double scale, int64_t heads);

}  // namespace assay::ops
