#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/torch.h>

#include <algorithm>

#include "ops/linear/linear.h"
#include "ops/tensors.h"

namespace assay::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using OneDnnLinear = at::Tensor(const at::Tensor&, const at::Tensor&,
                                const std::optional<at::Tensor>&, std::string_view,
                                c10::List<std::optional<at::Scalar>>,
                                std::optional<std::string_view>);

// Registered by torch where it was built with oneDNN.
const auto* onednn() {
  static const auto op = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
  return op && at::globalContext().userEnabledMkldnn() ? &*op : nullptr;
}

bool uses_onednn(const at::Tensor& x) {
  return x.is_cpu() && x.scalar_type() == at::kFloat && onednn();
}

at::Tensor onednn_linear(const at::Tensor& x, const at::Tensor& weight,
                         const OptionalTensor& bias) {
  static const auto call = onednn()->typed<OneDnnLinear>();
  return call.call(x, weight, bias, "none", c10::List<std::optional<at::Scalar>>(), "");
}

bool needs_gradient(std::initializer_list<at::Tensor> tensors) {
  if (!at::GradMode::is_enabled()) return false;
  return std::ranges::any_of(
      tensors, [](const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); });
}

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const OptionalTensor& bias) {
    ctx->save_for_backward({x, weight});
    ctx->saved_data["bias"] = bias.has_value();
    return onednn_linear(x, weight, bias);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& weight = saved[1];
    const at::Tensor x = saved[0].flatten(0, -2), dy = gradients[0].contiguous();
    const at::Tensor rows = dy.flatten(0, -2);
    const at::Tensor dx =
        ctx->needs_input_grad(0) ? onednn_linear(dy, weight.t(), {}) : at::Tensor();
    return {dx, at::mm(rows.t(), x), ctx->saved_data["bias"].toBool() ? rows.sum(0) : at::Tensor()};
  }
};

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (!uses_onednn(x) || x.dim() < 2) return at::linear(x, weight, optional(bias));
  if (!needs_gradient({x, weight, bias}))
    return onednn_linear(x.contiguous(), weight, optional(bias));
  return LinearFunction::apply(x.contiguous(), weight, optional(bias));
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  return uses_onednn(a) ? onednn_linear(a, b, {}) : at::mm(a, b.t());
}

}  // namespace assay::ops
