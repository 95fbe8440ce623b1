#pragma once
// The element-wise parts of RWKV-7's time mix around its recurrence, differentiable. Formulas:
// kernel.h in this folder.
#include <ATen/core/Tensor.h>

namespace assay::ops {

// Sequences have one shape [..., D] (fp32, fp64, bf16) and results have their dtype; parameters are
// [D] (fp32; fp64 for fp64). D is `heads` equal parts. ValueError naming the argument when a shape
// does not fit. The references are plain tensor arithmetic and define the results.
struct Rwkv7Prepared {
  // ln w in fp32 (fp64 for fp64), k', −κ, κ ⊙ a
  at::Tensor log_decay;
  at::Tensor k;
  at::Tensor minus_removed;
  at::Tensor added;
};
Rwkv7Prepared rwkv7_prepare(const at::Tensor& d, const at::Tensor& e, const at::Tensor& k,
                            const at::Tensor& k_k, const at::Tensor& k_a, int64_t heads);
Rwkv7Prepared rwkv7_prepare_reference(const at::Tensor& d, const at::Tensor& e, const at::Tensor& k,
                                      const at::Tensor& k_k, const at::Tensor& k_a, int64_t heads);
at::Tensor rwkv7_values(const at::Tensor& v, const at::Tensor& v_first, const at::Tensor& m);
at::Tensor rwkv7_values_reference(const at::Tensor& v, const at::Tensor& v_first,
                                  const at::Tensor& m);
at::Tensor rwkv7_output(const at::Tensor& n, const at::Tensor& r, const at::Tensor& k,
                        const at::Tensor& v, const at::Tensor& g, const at::Tensor& r_k,
                        int64_t heads);
at::Tensor rwkv7_output_reference(const at::Tensor& n, const at::Tensor& r, const at::Tensor& k,
                                  const at::Tensor& v, const at::Tensor& g, const at::Tensor& r_k,
                                  int64_t heads);

}  // namespace assay::ops
