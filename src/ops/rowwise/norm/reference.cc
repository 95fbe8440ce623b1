#include <torch/torch.h>

#include "ops/rowwise/norm/norm.h"

namespace assay::ops {
namespace {

at::Tensor unit(const at::Tensor& x, double eps) {
  return x * (x.square().mean(-1, true) + eps).rsqrt();
}

}  // namespace

at::Tensor rms_norm_reference(const at::Tensor& x, const at::Tensor& weight, double eps,
                              int64_t groups) {
  const at::Tensor parts = x.to(weight.scalar_type()).unflatten(-1, {groups, -1});
  return (unit(parts, eps).flatten(-2) * weight).to(x.scalar_type());
}

at::Tensor layer_norm_reference(const at::Tensor& x, const at::Tensor& weight,
                                const at::Tensor& bias, double eps, int64_t groups) {
  const at::Tensor parts = x.to(weight.scalar_type()).unflatten(-1, {groups, -1});
  return (unit(parts - parts.mean(-1, true), eps).flatten(-2) * weight + bias).to(x.scalar_type());
}

}  // namespace assay::ops
