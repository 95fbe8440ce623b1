// The root-mean-square norm: checks, and the autograd function around the kernels.
#include <torch/torch.h>

#include "ops/parallel.h"
#include "ops/paths.h"
#include "ops/rms_norm/kernel.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/tensors.h"

namespace assay::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "rms_norm";

RmsNorm describe(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale, double eps) {
  return {kernel_dtype(x.scalar_type()), x.numel() / weight.size(0), weight.size(0), eps, data(x), data(weight), nullptr, data(scale)};
}

void launch(const RmsNorm& p, [[maybe_unused]] const at::Device& device) {
#ifdef ASSAY_CUDA
  if (device.is_cuda()) {
    const c10::DeviceGuard guard(device);
    return cuda::rms_norm(p, current_stream(device));
  }
#endif
  cpu::rms_norm(p, at_parallel_for());
}
void launch(const RmsNormBackward& q, const at::Device& device) {
#ifdef ASSAY_CUDA
  if (device.is_cuda()) {
    const c10::DeviceGuard guard(device);
    const at::Tensor scratch = workspace(cuda::workspace_bytes(q), device);
    return cuda::rms_norm(q, scratch.data_ptr(), current_stream(device));
  }
#endif
  cpu::rms_norm(q, workspace(cpu::workspace_bytes(q), device).data_ptr(), at_parallel_for());
}

struct RmsNormFunction : torch::autograd::Function<RmsNormFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight, double eps) {
    const at::Tensor y = at::empty_like(x), scale = at::empty({x.numel() / x.size(-1)}, weight.options());
    RmsNorm p = describe(x, weight, scale, eps);
    p.y = data(y);
    launch(p, x.device());
    ctx->save_for_backward({x, weight, scale});
    ctx->saved_data["eps"] = eps;
    return y;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list s = ctx->get_saved_variables();
    const at::Tensor dy = gradients[0].contiguous(), dx = at::empty_like(s[0]), dweight = at::empty_like(s[1]);
    launch(RmsNormBackward{describe(s[0], s[1], s[2], ctx->saved_data["eps"].toDouble()), data(dy), data(dx), data(dweight)}, dx.device());
    return {dx, dweight, at::Tensor()};
  }
};

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  TORCH_CHECK_VALUE(x.dim() > 0 && x.numel() > 0, kOp, ": x has shape ", x.sizes(), ", expected [..., D]");
  check_shape(kOp, "weight", weight, {x.size(-1)}, "[D]");
  check_like(kOp, "x", x, x), check_like(kOp, "weight", weight, x);
  if (!x.is_cpu() && !(x.is_cuda() && kCudaKernels)) return rms_norm_reference(x, weight, eps);
  const auto dtype = sequence_dtype({x});
  return RmsNormFunction::apply(parameter(x, dtype), parameter(weight, real_dtype(dtype)), eps).to(x.scalar_type());
}

const bool registered_path = register_kernels(kOp);

}  // namespace assay::ops
