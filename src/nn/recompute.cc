#include "nn/recompute.h"

#include <torch/torch.h>

#include <utility>

namespace assay::nn {
namespace {

using Body = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

thread_local Choices* current = nullptr;  // the backward of a GPU's work is on a thread of its own

// A layer and what its first run remembered.
struct Holder : torch::CustomClassHolder {
  explicit Holder(Body b) : body(std::move(b)) {}
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, bool again) {
    const WithChoices scope(choices, again);
    return body(inputs);
  }

  Body body;
  Choices choices;
};

struct Recompute : torch::autograd::Function<Recompute> {
  static std::vector<at::Tensor> forward(torch::autograd::AutogradContext* context,
                                         at::TensorList inputs, const Body& body) {
    const auto holder = c10::make_intrusive<Holder>(body);
    context->saved_data["body"] = c10::IValue::make_capsule(holder);
    context->save_for_backward(inputs.vec());
    const at::NoGradGuard no_grad;
    return holder->run(inputs.vec(), false);
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* context,
                                          std::vector<at::Tensor> gradients) {
    const auto holder =
        c10::static_intrusive_pointer_cast<Holder>(context->saved_data["body"].toCapsule());
    const at::AutoGradMode with_grad(true);
    std::vector<at::Tensor> inputs;
    for (const at::Tensor& input : context->get_saved_variables())
      inputs.push_back(input.detach().requires_grad_());
    torch::autograd::backward(holder->run(inputs, true), gradients);
    for (at::Tensor& input : inputs) input = input.grad();
    inputs.emplace_back();  // of the body
    return inputs;
  }
};

}  // namespace

WithChoices::WithChoices(Choices& choices, bool again) : outer_(std::exchange(current, &choices)) {
  choices.again = again;
  choices.recalled = 0;
}
WithChoices::~WithChoices() { current = outer_; }

std::optional<at::Tensor> recalled() {
  if (!current || !current->again) return {};
  return current->made.at(current->recalled++);
}

void remember(const at::Tensor& found) {
  if (current && !current->again) current->made.push_back(found.detach());
}

at::Tensor recomputed(const std::function<at::Tensor(const at::Tensor&, Handed&)>& layer,
                      const at::Tensor& x, Handed& handed) {
  std::vector<at::Tensor> inputs = {x};
  std::vector<std::string> before;
  for (const auto& [name, tensor] : handed) {
    before.push_back(name);
    inputs.push_back(tensor);
  }
  const auto after = std::make_shared<std::vector<std::string>>();
  const Body body = [layer, before, after](const std::vector<at::Tensor>& in) {
    Handed named;
    for (size_t i = 0; i < before.size(); ++i) named[before[i]] = in[i + 1];
    std::vector<at::Tensor> out = {layer(in[0], named)};
    after->clear();
    for (const auto& [name, tensor] : named) {
      after->push_back(name);
      out.push_back(tensor);
    }
    return out;
  };
  const auto out = Recompute::apply(at::TensorList(inputs), body);
  handed.clear();
  for (size_t i = 0; i < after->size(); ++i) handed[(*after)[i]] = out[i + 1];
  return out[0];
}

}  // namespace assay::nn
