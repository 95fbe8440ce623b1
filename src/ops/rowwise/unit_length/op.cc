// Rows of unit length: checks and the reference implementation.
#include "ops/core/rowwise_op.h"
#include "ops/rowwise/unit_length/unit_length.h"

namespace assay::ops {

at::Tensor unit_length_reference(const at::Tensor& x, double eps, int64_t groups) {
  const at::Tensor parts =
      x.to(at::promote_types(x.scalar_type(), at::kFloat)).unflatten(-1, {groups, -1});
  return (parts * at::rsqrt(parts.square().sum(-1, true) + eps)).flatten(-2).to(x.scalar_type());
}

at::Tensor unit_length(const at::Tensor& x, double eps, int64_t groups) {
  check_like("unit_length", "x", x, "x", x);
  TORCH_CHECK_VALUE(x.dim() > 0 && groups >= 1 && x.size(-1) % groups == 0, "unit_length: ", groups,
                    " groups do not divide a row of x, which has shape ", x.sizes());
  if (!has_rowwise_kernel(x, groups)) return unit_length_reference(x, eps, groups);
  return rowwise<UnitLength>({x}, {}, eps, groups)[0];
}

const bool registered_unit_length = register_kernels("unit_length");

}  // namespace assay::ops
