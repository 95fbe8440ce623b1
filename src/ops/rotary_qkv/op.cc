// Rotary queries, keys and values: checks, and the autograd function around the kernel.
#include <torch/torch.h>

#include "ops/dispatch.h"
#include "ops/rotary_qkv/kernel.h"
#include "ops/rotary_qkv/rotary_qkv.h"
#include "ops/split.h"

namespace assay::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "rotary_qkv";

void launch(const RotaryQkv& p, const at::Device& device) {
  dispatch(
      device, [&](const auto& pool) { cpu::rotary_qkv(p, pool); },
      [&](auto stream) { cuda::rotary_qkv(p, stream); });
}

// One description serves both directions: `backward` says which side is read. parts are q, k and v;
// v may be left out. scale is undefined without QK-norm.
RotaryQkv describe(const at::Tensor& qkv, const variable_list& parts, const at::Tensor& cos,
                   const at::Tensor& sin, const at::Tensor& scale) {
  RotaryQkv p{};
  p.dtype = kernel_dtype(qkv.scalar_type());
  p.batch = qkv.size(0);
  p.time = qkv.size(1);
  p.heads = parts[0].size(2);
  p.kv_heads = parts[1].size(2);
  p.head_dim = qkv.size(3);
  p.qkv = data(qkv);
  p.qkv_stride = qkv.stride(p.time > 1 ? 1 : 0);
  p.q = data(parts[0]);
  p.k = data(parts[1]);
  p.v = parts.size() > 2 ? data(parts[2]) : nullptr;
  p.cos = data(cos);
  p.sin = data(sin);
  p.scale = data(scale);
  return p;
}

struct RotaryQkvFunction : torch::autograd::Function<RotaryQkvFunction> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& qkv, int64_t kv_heads,
                               const at::Tensor& cos, const at::Tensor& sin,
                               const OptionalTensor& scale, bool with_values) {
    const auto part = [&](int64_t heads) {
      return at::empty({qkv.size(0), qkv.size(1), heads, qkv.size(3)}, qkv.options());
    };
    const int64_t heads = qkv.size(2) - (with_values ? 2 : 1) * kv_heads;
    variable_list parts = {part(heads), part(kv_heads)};
    if (with_values) parts.push_back(part(kv_heads));
    launch(describe(qkv, parts, cos, sin, or_undefined(scale)), qkv.device());
    ctx->save_for_backward(
        {cos, sin, or_undefined(scale), scale || !with_values ? qkv : at::Tensor()});
    return parts;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &scale = saved[2], &qkv = saved[3];
    variable_list parts;
    for (const at::Tensor& gradient : gradients) parts.push_back(gradient.contiguous());
    const at::Tensor& q = parts[0];
    const int64_t kv_heads = (int64_t(parts.size()) - 1) * parts[1].size(2);
    const at::Tensor dqkv =
        qkv.defined()
            ? gradient_memory(qkv)
            : at::empty({q.size(0), q.size(1), q.size(2) + kv_heads, q.size(3)}, q.options());
    RotaryQkv p = describe(dqkv, parts, saved[0], saved[1], scale);
    p.backward = true;
    if (scale.defined()) p.normed = data(qkv);
    at::Tensor dscale;
    if (scale.defined()) {
      dscale = at::empty({q.size(0), q.size(1), q.size(2)}, scale.options());
      p.dscale = data(dscale);
    }
    launch(p, dqkv.device());
    if (scale.defined()) dscale = dscale.sum(at::IntArrayRef{0, 1});
    return {dqkv, at::Tensor(), at::Tensor(), at::Tensor(), dscale, at::Tensor()};
  }
};

// q, k and, if there are values, v.
variable_list rotated(const char* op, const at::Tensor& qkv, int64_t kv_heads,
                      const at::Tensor& cos, const at::Tensor& sin, const OptionalTensor& scale,
                      bool with_values) {
  check_dims(op, "qkv", qkv, 4, with_values ? "[B, T, H + 2 Hk, D]" : "[B, T, H + Hk, D]");
  const int64_t time = qkv.size(1), half = qkv.size(3) / 2,
                heads = qkv.size(2) - (with_values ? 2 : 1) * kv_heads;
  TORCH_CHECK_VALUE(qkv.size(3) % 2 == 0, op, ": qkv has shape ", qkv.sizes(), "; D must be even");
  TORCH_CHECK_VALUE(kv_heads > 0 && heads > 0, op, ": kv_heads = ", kv_heads,
                    " does not fit qkv with ", qkv.size(2), " heads");
  check_shape(op, "cos", cos, {time, half}, "[T, D/2]");
  check_shape(op, "sin", sin, {time, half}, "[T, D/2]");
  check_like(op, "qkv", qkv, "qkv", qkv);
  check_like(op, "cos", cos, "qkv", qkv);
  check_like(op, "sin", sin, "qkv", qkv);
  if (scale) {
    check_shape(op, "scale", *scale, {heads}, "[H]");
    check_like(op, "scale", *scale, "qkv", qkv);
  }
  if (!qkv.is_cpu() && !(qkv.is_cuda() && kCudaKernels)) {
    const auto parts = rotary_qkv_reference(qkv, kv_heads, cos, sin, scale, with_values);
    return {parts.begin(), parts.end()};
  }
  const auto dtype = sequence_dtype({qkv}), real = real_dtype(dtype);
  // a part of the rows of a projection is read where it is, unless QK-norm keeps it
  const at::Tensor packed =
      (scale ? parameter(qkv, dtype) : sequence(qkv, dtype)).flatten(0, 1).unflatten(0, {-1, time});
  auto parts = RotaryQkvFunction::apply(packed.is_contiguous() ? packed : aligned_rows(packed),
                                        kv_heads, parameter(cos, real), parameter(sin, real),
                                        optional(parameter(scale, real)), with_values);
  for (at::Tensor& part : parts) part = part.to(qkv.scalar_type());
  return parts;
}

}  // namespace

std::array<at::Tensor, 3> rotary_qkv(const at::Tensor& qkv, int64_t kv_heads, const at::Tensor& cos,
                                     const at::Tensor& sin, const OptionalTensor& scale) {
  const auto parts = rotated(kOp, qkv, kv_heads, cos, sin, scale, /*with_values=*/true);
  return {parts[0], parts[1], parts[2]};
}

std::array<at::Tensor, 2> rotary_qk(const at::Tensor& qk, int64_t kv_heads, const at::Tensor& cos,
                                    const at::Tensor& sin) {
  const auto parts = rotated("rotary_qk", qk, kv_heads, cos, sin, {}, /*with_values=*/false);
  return {parts[0], parts[1]};
}

const bool registered_path = register_kernels(kOp, /*numerics=*/2);  // QK-norm was composed before

}  // namespace assay::ops
