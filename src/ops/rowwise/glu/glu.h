#pragma once
// Gated linear unit, differentiable. Formula and source: kernel.h in this folder.
#include <ATen/core/Tensor.h>

#include <string_view>

namespace assay::ops {

// h [..., 2 F] (fp32, fp64, bf16), activation "silu" or "gelu" (tanh form) → act(h[..., :F]) ⊙
// h[..., F:], [..., F].
at::Tensor glu(const at::Tensor& h, std::string_view activation);
// c and a of kernel.h; ValueError unless the activation is one of the two.
struct GluActivation {
  double c;
  double a;
};
GluActivation glu_activation(std::string_view activation);
// from tensor arithmetic: defines the result
at::Tensor glu_reference(const at::Tensor& h, std::string_view activation);

}  // namespace assay::ops
