// The token shift: checks, and the autograd function around the kernels.
#include <torch/torch.h>

#include "ops/core/dispatch.h"
#include "ops/recurrence/token_shift/kernel.h"
#include "ops/recurrence/token_shift/token_shift.h"

namespace assay::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "token_shift";

template <class Work>
void launch(const Work& work, const at::Device& device) {
  dispatch(
      device, [&](const auto& pool) { cpu::token_shift(work, pool); },
      [&](auto stream) { cuda::token_shift(work, stream); });
}

// in: x, mix, own…
TokenShift describe(at::TensorList in, const OptionalTensor& before) {
  const at::Tensor& x = in[0];
  const at::Tensor& mix = in[1];
  TokenShift p{};
  p.dtype = kernel_dtype(x.scalar_type());
  p.batch = x.size(0);
  p.time = x.size(1);
  p.width = x.size(2);
  p.count = mix.size(0);
  p.x = data(x);
  p.before = data(or_undefined(before));
  p.mix = data(mix);
  for (size_t i = 2; i < in.size(); ++i) p.own[i - 2] = data(in[i]);
  return p;
}

struct TokenShiftFunction : torch::autograd::Function<TokenShiftFunction> {
  static variable_list forward(AutogradContext* ctx, at::TensorList in,
                               const OptionalTensor& before) {
    TokenShift p = describe(in, before);
    variable_list y;
    variable_list saved = in.vec();
    for (int64_t i = 0; i < p.count; ++i) p.y[i] = data(y.emplace_back(at::empty_like(in[0])));
    launch(p, in[0].device());
    saved.push_back(or_undefined(before));
    ctx->save_for_backward(saved);
    return y;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    variable_list in = ctx->get_saved_variables();
    const OptionalTensor before = optional(in.back());
    in.pop_back();
    const at::Tensor& x = in[0];
    const at::Tensor& mix = in[1];
    TokenShiftBackward q{.forward = describe(in, before)};
    variable_list dy;
    variable_list out = {at::empty_like(x), at::Tensor()};
    for (const at::Tensor& gradient : gradients) dy.push_back(gradient.contiguous());
    for (size_t i = 0; i < dy.size(); ++i) q.dy[i] = data(dy[i]);
    for (size_t i = 2; i < in.size(); ++i)
      q.down[i - 2] = data(out.emplace_back(at::empty_like(x)));
    const int64_t runs = x.size(0) * runs_of_sequence(q.forward);
    const at::Tensor dmix = at::empty({runs, mix.size(0), mix.size(1)}, mix.options());
    q.dx = data(out[0]);
    q.dmix = data(dmix);
    launch(q, x.device());
    out[1] = dmix.sum(0);
    out.push_back(before ? gradient_before(dy, mix, at::TensorList(in).slice(2)) : at::Tensor());
    return out;
  }
  // Position −1 is read by position 0 alone.
  static at::Tensor gradient_before(const variable_list& dy, const at::Tensor& mix,
                                    at::TensorList own) {
    at::Tensor sum;
    for (size_t i = 0; i < dy.size(); ++i) {
      const at::Tensor weight =
          own.empty() ? mix[int64_t(i)] : mix[int64_t(i)] + own[i].select(1, 0);
      const at::Tensor part = dy[i].select(1, 0).to(mix.scalar_type()) * weight;
      sum = sum.defined() ? sum + part : part;
    }
    return sum.to(dy[0].scalar_type());
  }
};

void check(const at::Tensor& x, const OptionalTensor& before, const at::Tensor& mix,
           const std::vector<at::Tensor>& own) {
  check_dims(kOp, "x", x, 3, "[B, T, D]");
  check_like(kOp, "x", x, "x", x);
  check_like(kOp, "mix", mix, "x", x);
  if (before) {
    check_shape(kOp, "before", *before, {x.size(0), x.size(2)}, "[B, D]");
    check_like(kOp, "before", *before, "x", x);
  }
  check_dims(kOp, "mix", mix, 2, "[n, D]");
  check_shape(kOp, "mix", mix, {mix.size(0), x.size(2)}, "[n, D]");
  TORCH_CHECK_VALUE(mix.size(0) <= kMaxShifts, kOp, ": mix has ", mix.size(0),
                    " rows, expected 1 to ", kMaxShifts);
  TORCH_CHECK_VALUE(own.empty() || int64_t(own.size()) == mix.size(0), kOp, ": own has ",
                    own.size(), " tensors, expected ", mix.size(0));
  for (const at::Tensor& tensor : own) {
    check_shape(kOp, "own", tensor, x.sizes(), "[B, T, D]");
    check_like(kOp, "own", tensor, "x", x);
  }
}

}  // namespace

std::vector<at::Tensor> token_shift(const at::Tensor& x, const OptionalTensor& before,
                                    const at::Tensor& mix, const std::vector<at::Tensor>& own) {
  check(x, before, mix, own);
  if (!x.is_cpu() && !on_gpu(x.device())) return token_shift_reference(x, before, mix, own);
  const auto dtype = sequence_dtype({x});
  variable_list in = {parameter(x, dtype), parameter(mix, real_dtype(dtype))};
  for (const at::Tensor& tensor : own) in.push_back(parameter(tensor, dtype));
  variable_list y =
      TokenShiftFunction::apply(at::TensorList(in), optional(parameter(before, dtype)));
  for (at::Tensor& tensor : y) tensor = tensor.to(x.scalar_type());
  return y;
}

const bool registered_path = register_kernels(kOp);

}  // namespace assay::ops
