#pragma once
// The operator around the kernels of elementwise.h: checks, autograd and dispatch. For op.cc files.
#include <torch/torch.h>

#include "ops/core/dispatch.h"
#include "ops/core/elementwise.h"

namespace assay::ops {

template <class F>
struct ElementwiseFunction : torch::autograd::Function<ElementwiseFunction<F>> {
  template <class Call>
  static void launch(const Call& call, const at::Device& device) {
    dispatch(
        device, [&](const auto& pool) { cpu::elementwise(call, pool); },
        [&](auto stream) { cuda::elementwise(call, stream); });
  }
  static Elementwise<F> describe(const at::Tensor& x, const at::Tensor& y) {
    return {kernel_dtype(x.scalar_type()), x.numel(), data(x), data(y)};
  }
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x) {
    const at::Tensor y = at::empty_like(x);
    launch(describe(x, y), x.device());
    ctx->save_for_backward({x});
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& gradients) {
    const at::Tensor x = ctx->get_saved_variables()[0];
    const at::Tensor dy = gradients[0].contiguous();
    const at::Tensor dx = at::empty_like(x);
    launch(ElementwiseBackward<F>{describe(x, {}), data(dy), data(dx)}, x.device());
    return {dx};
  }
};

// f(x) in the dtype of x, which has any shape; `reference` where x's device has no kernel. Throws
// ValueError unless x holds floating-point numbers.
template <class F>
at::Tensor elementwise(const char* op, const at::Tensor& x,
                       at::Tensor (*reference)(const at::Tensor&)) {
  check_like(op, "x", x, "x", x);
  if (x.numel() == 0 || !(x.is_cpu() || on_gpu(x.device()))) return reference(x);
  return ElementwiseFunction<F>::apply(parameter(x, sequence_dtype({x}))).to(x.scalar_type());
}

}  // namespace assay::ops
