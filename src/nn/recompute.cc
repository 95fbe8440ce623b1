#include "nn/recompute.h"

#include <torch/torch.h>

namespace assay::nn {
namespace {

using Body = std::function<at::Tensor(const at::Tensor&)>;

struct Holder : torch::CustomClassHolder {
  explicit Holder(Body b) : body(std::move(b)) {}
  Body body;
};

struct Recompute : torch::autograd::Function<Recompute> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const Body& body) {
    context->saved_data["body"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(body));
    context->save_for_backward({x});
    const at::NoGradGuard no_grad;
    return body(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list gradient) {
    const auto holder = c10::static_intrusive_pointer_cast<Holder>(context->saved_data["body"].toCapsule());
    const at::AutoGradMode with_grad(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    torch::autograd::backward({holder->body(x)}, {gradient[0]});
    return {x.grad(), at::Tensor()};
  }
};

}  // namespace

at::Tensor recomputed(const Body& layer, const at::Tensor& x) { return Recompute::apply(x, layer); }

}  // namespace assay::nn
