#include <torch/torch.h>

#include "ops/rms_norm/rms_norm.h"

namespace assay::ops {

at::Tensor rms_norm_reference(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const at::Tensor wide = x.to(weight.scalar_type());
  return (wide * (wide.square().mean(-1, true) + eps).rsqrt() * weight).to(x.scalar_type());
}

}  // namespace assay::ops
