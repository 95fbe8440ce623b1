// Norms: checks, and the autograd function around the kernels.
#include <torch/torch.h>

#include "ops/core/dispatch.h"
#include "ops/core/rowwise_op.h"
#include "ops/rowwise/norm/kernel.h"
#include "ops/rowwise/norm/norm.h"

namespace assay::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The tensors of a call; bias and mean are undefined for the root-mean-square norm.
struct Call {
  at::Tensor x;
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor scale;
  at::Tensor mean;
  int64_t groups;
  double eps;

  Norm kernel() const {
    const int64_t size = weight.size(0);
    return {kernel_dtype(x.scalar_type()),
            x.numel() / size,
            groups,
            size / groups,
            eps,
            data(x),
            data(weight),
            data(bias),
            nullptr,
            data(scale),
            data(mean)};
  }
};

void launch(const Norm& p, const at::Device& device) {
  dispatch(
      device, [&](const auto& pool) { cpu::norm(p, pool); },
      [&](auto stream) { cuda::norm(p, stream); });
}
void launch(const NormBackward& bwd, const at::Device& device) {
  const auto scratch = [&](size_t bytes) { return workspace(bytes, device); };
  dispatch(
      device,
      [&](const auto& pool) {
        cpu::norm(bwd, scratch(cpu::workspace_bytes(bwd)).data_ptr(), pool);
      },
      [&](auto stream) {
        cuda::norm(bwd, scratch(cuda::workspace_bytes(bwd)).data_ptr(), stream);
      });
}

// Writes the norm of x to y, or that of sum = x + added where they are defined, and saves what its
// gradient needs.
void forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
             const OptionalTensor& bias, double eps, int64_t groups, const at::Tensor& y,
             const at::Tensor& added = {}, const at::Tensor& sum = {}) {
  const at::Tensor scale = at::empty({x.numel() / weight.size(0) * groups}, weight.options());
  const Call call{
      x,      weight, or_undefined(bias), scale, bias ? at::empty_like(scale) : at::Tensor(),
      groups, eps};
  Norm p = call.kernel();
  p.y = data(y);
  p.added = data(added);
  p.sum = data(sum);
  launch(p, x.device());
  ctx->save_for_backward({sum.defined() ? sum : x, weight, call.bias, scale, call.mean});
  ctx->saved_data["eps"] = eps;
  ctx->saved_data["groups"] = groups;
}

// Gradients of x, weight and bias; that of x includes dsum if it is defined.
variable_list backward(AutogradContext* ctx, const at::Tensor& gradient,
                       const at::Tensor& dsum = {}) {
  const variable_list s = ctx->get_saved_variables();
  const Call call{aligned(s[0]),
                  aligned(s[1]),
                  s[2],
                  s[3],
                  s[4],
                  ctx->saved_data["groups"].toInt(),
                  ctx->saved_data["eps"].toDouble()};
  const bool bias = call.bias.defined();
  const at::Tensor dy = aligned(gradient.contiguous());
  const at::Tensor dx = at::empty_like(call.x);
  const at::Tensor dparameters = at::empty({1 + bias, call.weight.size(0)}, call.weight.options());
  launch(NormBackward{call.kernel(), data(dy), data(dx), data(dparameters), data(dsum)},
         dx.device());
  return {dx, dparameters[0], bias ? dparameters[1] : at::Tensor()};
}

struct NormFunction : torch::autograd::Function<NormFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const OptionalTensor& bias, double eps, int64_t groups) {
    const at::Tensor y = at::empty_like(x);
    ops::forward(ctx, x, weight, bias, eps, groups, y);
    return y;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list d = ops::backward(ctx, gradients[0]);
    return {d[0], d[1], d[2], at::Tensor(), at::Tensor()};
  }
};

struct AddNormFunction : torch::autograd::Function<AddNormFunction> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& added,
                               const at::Tensor& weight, const OptionalTensor& bias, double eps,
                               int64_t groups) {
    ctx->set_materialize_grads(false);
    const at::Tensor sum = at::empty_like(x);
    const at::Tensor y = at::empty_like(x);
    ops::forward(ctx, x, weight, bias, eps, groups, y, added, sum);
    return {sum, y};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const at::Tensor dsum =
        gradients[0].defined() ? aligned(gradients[0].contiguous()) : gradients[0];
    if (!gradients[1].defined())
      return {dsum, dsum, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
    const variable_list d = ops::backward(ctx, gradients[1], dsum);
    return {d[0], d[0], d[1], d[2], at::Tensor(), at::Tensor()};
  }
};

void check(const char* op, const at::Tensor& x, const at::Tensor& weight,
           const OptionalTensor& bias, int64_t groups) {
  TORCH_CHECK_VALUE(x.dim() > 0 && x.numel() > 0, op, ": x has shape ", x.sizes(),
                    ", expected [..., D]");
  check_shape(op, "weight", weight, {x.size(-1)}, "[D]");
  check_like(op, "x", x, "x", x);
  check_like(op, "weight", weight, "x", x);
  if (bias) {
    check_shape(op, "bias", *bias, {x.size(-1)}, "[D]");
    check_like(op, "bias", *bias, "x", x);
  }
  TORCH_CHECK_VALUE(groups >= 1 && x.size(-1) % groups == 0, op, ": groups = ", groups,
                    " does not divide D = ", x.size(-1));
}

// On CUDA the gradient of wide rows has no kernel.
bool has_kernel(const at::Tensor& x, int64_t groups) {
  const bool forward = x.is_cpu() || on_gpu(x.device());
  return forward && (!at::GradMode::is_enabled() || has_rowwise_kernel(x, groups));
}

at::Tensor normed(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                  double eps, int64_t groups) {
  const auto dtype = sequence_dtype({x});
  const auto real = real_dtype(dtype);
  return NormFunction::apply(parameter(x, dtype), parameter(weight, real),
                             optional(parameter(bias, real)), eps, groups)
      .to(x.scalar_type());
}

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, int64_t groups) {
  check("rms_norm", x, weight, {}, groups);
  return has_kernel(x, groups) ? normed(x, weight, {}, eps, groups)
                               : rms_norm_reference(x, weight, eps, groups);
}

at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      double eps, int64_t groups) {
  check("layer_norm", x, weight, bias, groups);
  return has_kernel(x, groups) ? normed(x, weight, bias, eps, groups)
                               : layer_norm_reference(x, weight, bias, eps, groups);
}

std::pair<at::Tensor, at::Tensor> add_norm(const at::Tensor& x, const at::Tensor& y,
                                           const at::Tensor& weight, const OptionalTensor& bias,
                                           double eps, int64_t groups) {
  const char* op = bias ? "layer_norm" : "rms_norm";
  check(op, x, weight, bias, groups);
  const auto dtype = x.scalar_type();
  const auto real = real_dtype(dtype);
  const bool one_kernel = x.is_cuda() && has_kernel(x, groups) && sequence_dtype({x}) == dtype &&
                          y.scalar_type() == dtype && y.sizes() == x.sizes() &&
                          y.device() == x.device();
  if (one_kernel) {
    const variable_list both =
        AddNormFunction::apply(parameter(x, dtype), parameter(y, dtype), parameter(weight, real),
                               optional(parameter(bias, real)), eps, groups);
    return {both[0], both[1]};
  }
  const at::Tensor sum = x + y;
  return {sum,
          bias ? layer_norm(sum, weight, *bias, eps, groups) : rms_norm(sum, weight, eps, groups)};
}

const bool registered_paths =
    register_kernels("rms_norm", /*numerics=*/2) && register_kernels("layer_norm");

}  // namespace assay::ops
