// Gated root-mean-square norms: checks and the reference implementation.
#include <torch/torch.h>

#include "ops/core/rowwise_op.h"
#include "ops/rowwise/gated_norm/gated_norm.h"
#include "ops/rowwise/norm/norm.h"

namespace assay::ops {

constexpr const char* kOp = "gated_rms_norm";

at::Tensor gated_rms_norm_reference(const at::Tensor& x, const at::Tensor& z,
                                    const at::Tensor& weight, double eps, bool gate_first,
                                    int64_t groups, std::string_view gate) {
  const auto real = weight.scalar_type();
  const at::Tensor factor = gate == "silu" ? at::silu(z.to(real)) : z.to(real).sigmoid();
  const at::Tensor wide = x.to(real);
  const at::Tensor y = gate_first ? rms_norm_reference(wide * factor, weight, eps, groups)
                                  : rms_norm_reference(wide, weight, eps, groups) * factor;
  return y.to(x.scalar_type());
}

at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& z, const at::Tensor& weight,
                          double eps, bool gate_first, int64_t groups, std::string_view gate) {
  TORCH_CHECK_VALUE(x.dim() > 0 && x.numel() > 0, kOp, ": x has shape ", x.sizes(),
                    ", expected [..., D]");
  check_shape(kOp, "z", z, x.sizes(), "that of x");
  check_shape(kOp, "weight", weight, {x.size(-1)}, "[D]");
  check_like(kOp, "x", x, "x", x);
  check_like(kOp, "z", z, "x", x);
  check_like(kOp, "weight", weight, "x", x);
  TORCH_CHECK_VALUE(groups >= 1 && x.size(-1) % groups == 0, kOp, ": groups = ", groups,
                    " does not divide D = ", x.size(-1));
  TORCH_CHECK_VALUE(gate == "silu" || (gate == "sigmoid" && !gate_first), kOp, ": gate = '", gate,
                    gate_first ? "', expected 'silu'" : "', expected 'silu' or 'sigmoid'");
  if (!has_rowwise_kernel(x, groups))
    return gated_rms_norm_reference(x, z, weight, eps, gate_first, groups, gate);
  const auto y = gate_first          ? rowwise<GateThenNorm>({x, z}, {weight}, eps, groups)
                 : gate == "sigmoid" ? rowwise<NormThenSigmoid>({x, z}, {weight}, eps, groups)
                                     : rowwise<NormThenGate>({x, z}, {weight}, eps, groups);
  return y[0].to(x.scalar_type());
}

const bool registered_gated_norm = register_kernels(kOp);

}  // namespace assay::ops
