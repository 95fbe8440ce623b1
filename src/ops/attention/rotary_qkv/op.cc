// Rotary queries, keys and values: checks, and the autograd function around the kernel.
#include <torch/torch.h>

#include "ops/attention/rotary_qkv/kernel.h"
#include "ops/attention/rotary_qkv/rotary_qkv.h"
#include "ops/core/dispatch.h"
#include "ops/core/split.h"

namespace assay::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The name under which runs record the kernels.
constexpr const char* kOp = "rotary_qkv";

void launch(const RotaryQk& p, const at::Device& device) {
  dispatch(
      device, [&](const auto& pool) { cpu::rotary_qk(p, pool); },
      [&](auto stream) { cuda::rotary_qk(p, stream); });
}

// One description serves both directions: `backward` says which side is read. parts are q and k;
// scale is undefined without QK-norm.
RotaryQk describe(const at::Tensor& qk, const variable_list& parts, const at::Tensor& cos,
                  const at::Tensor& sin, const at::Tensor& scale) {
  RotaryQk p{};
  p.dtype = kernel_dtype(qk.scalar_type());
  p.batch = qk.size(0);
  p.time = qk.size(1);
  p.heads = parts[0].size(2);
  p.kv_heads = parts[1].size(2);
  p.head_dim = qk.size(3);
  p.qk = view(qk);
  p.q = view(parts[0]);
  p.k = view(parts[1]);
  p.cos = data(cos);
  p.sin = data(sin);
  p.scale = data(scale);
  return p;
}

struct RotaryQkFunction : torch::autograd::Function<RotaryQkFunction> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& qk, int64_t kv_heads,
                               const at::Tensor& cos, const at::Tensor& sin,
                               const OptionalTensor& scale, bool in_place) {
    // no views in the eyes of autograd, which would reject that they are written here
    const at::AutoDispatchBelowADInplaceOrView no_views;
    variable_list parts = qk.split_with_sizes({qk.size(2) - kv_heads, kv_heads}, 2);
    if (!in_place)
      for (at::Tensor& part : parts) part = at::empty(part.sizes(), part.options());
    launch(describe(qk, parts, cos, sin, or_undefined(scale)), qk.device());
    ctx->save_for_backward({qk, cos, sin, or_undefined(scale)});
    return parts;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& qk = saved[0];
    const at::Tensor& scale = saved[3];
    variable_list parts;
    for (const at::Tensor& gradient : gradients)
      parts.push_back(sequence(gradient, qk.scalar_type()));
    const at::Tensor dqk = gradient_memory(qk);
    RotaryQk p = describe(dqk, parts, saved[1], saved[2], scale);
    p.backward = true;
    at::Tensor dscale;
    if (scale.defined()) {
      dscale = at::empty({qk.size(0), qk.size(1), parts[0].size(2)}, scale.options());
      p.normed = view(qk);
      p.dscale = data(dscale);
    }
    launch(p, dqk.device());
    if (scale.defined()) dscale = dscale.sum(at::IntArrayRef{0, 1});
    return {dqk, at::Tensor(), at::Tensor(), at::Tensor(), dscale, at::Tensor()};
  }
};

std::array<at::Tensor, 2> rotated(const char* op, const at::Tensor& qk, int64_t kv_heads,
                                  const at::Tensor& cos, const at::Tensor& sin,
                                  const OptionalTensor& scale, bool in_place) {
  check_dims(op, "qk", qk, 4, "[B, T, H + Hk, D]");
  const int64_t time = qk.size(1);
  const int64_t half = qk.size(3) / 2;
  const int64_t heads = qk.size(2) - kv_heads;
  TORCH_CHECK_VALUE(qk.size(3) % 2 == 0, op, ": qk has shape ", qk.sizes(), "; D must be even");
  TORCH_CHECK_VALUE(kv_heads > 0 && heads > 0, op, ": kv_heads = ", kv_heads,
                    " does not fit qk with ", qk.size(2), " heads");
  check_shape(op, "cos", cos, {time, half}, "[T, D/2]");
  check_shape(op, "sin", sin, {time, half}, "[T, D/2]");
  check_like(op, "qk", qk, "qk", qk);
  check_like(op, "cos", cos, "qk", qk);
  check_like(op, "sin", sin, "qk", qk);
  if (scale) {
    check_shape(op, "scale", *scale, {heads}, "[H]");
    check_like(op, "scale", *scale, "qk", qk);
  }
  if (!qk.is_cpu() && !on_gpu(qk.device()))
    return rotary_qk_reference(qk, kv_heads, cos, sin, scale);
  const auto dtype = sequence_dtype({qk});
  const auto real = real_dtype(dtype);
  const auto parts =
      RotaryQkFunction::apply(sequence(qk, dtype), kv_heads, parameter(cos, real),
                              parameter(sin, real), optional(parameter(scale, real)), in_place);
  return {parts[0].to(qk.scalar_type()), parts[1].to(qk.scalar_type())};
}

}  // namespace

std::array<at::Tensor, 3> rotary_qkv_(const at::Tensor& projected, int64_t heads, int64_t kv_heads,
                                      const at::Tensor& cos, const at::Tensor& sin,
                                      const OptionalTensor& scale) {
  check_dims(kOp, "projected", projected, 3, "[B, T, (H + 2 Hk) D]");
  const int64_t all = heads + 2 * kv_heads;
  const int64_t D = 2 * cos.size(-1);
  TORCH_CHECK_VALUE(heads > 0 && kv_heads > 0 && projected.size(2) == all * D, kOp,
                    ": projected has ", projected.size(2),
                    " columns, expected (H + 2 Hk) D = ", all * D);
  const auto part = ops::split(projected, {(heads + kv_heads) * D, kv_heads * D});
  // autograd must not see a view of `projected` change: split() gives none where it can
  const bool in_place = !scale && !(part[0].requires_grad() && part[0].is_view());
  const auto [q, k] = rotated(kOp, part[0].unflatten(-1, {heads + kv_heads, D}), kv_heads, cos, sin,
                              scale, in_place);
  // It rejects a backward pass that has kept `projected`.
  if (in_place) projected.unsafeGetTensorImpl()->bump_version();
  return {q, k, part[1].unflatten(-1, {kv_heads, D})};
}

std::array<at::Tensor, 2> rotary_qk(const at::Tensor& qk, int64_t kv_heads, const at::Tensor& cos,
                                    const at::Tensor& sin, const OptionalTensor& scale) {
  return rotated("rotary_qk", qk, kv_heads, cos, sin, scale, /*in_place=*/false);
}

const bool registered_path = register_kernels(kOp, /*numerics=*/2);  // QK-norm was composed before

}  // namespace assay::ops
