#include "nn/context.h"

#include <torch/torch.h>

namespace assay::nn {
namespace {

at::Tensor leaf(const at::Tensor& x) {
  return x.is_floating_point() ? x.detach().requires_grad_() : x;
}
Handed leaves(const Handed& tensors) {
  Handed out;
  for (const auto& [name, tensor] : tensors) out[name] = leaf(tensor);
  return out;
}

// As a tensor that another process sent: memory of its own, in the order of its dimensions.
at::Tensor copied(const at::Tensor& x) {
  return at::empty(x.sizes(), x.options().requires_grad(false)).copy_(x.detach());
}
Handed copied(const Handed& tensors) {
  Handed out;
  for (const auto& [name, tensor] : tensors) out[name] = copied(tensor);
  return out;
}

// Zero where the tensor has no effect. What is sent may not depend on the slice.
at::Tensor gradient_of(const at::Tensor& leaf) {
  return leaf.grad().defined() ? leaf.grad() : at::zeros_like(leaf);
}
Handed gradients_of(const Handed& leaves) {
  Handed out;
  for (const auto& [name, tensor] : leaves)
    if (tensor.is_floating_point()) out[name] = gradient_of(tensor);
  return out;
}

std::vector<at::Tensor> values(const Handed& tensors) {
  std::vector<at::Tensor> out;
  for (const auto& [name, tensor] : tensors) out.push_back(tensor);
  return out;
}

}  // namespace

SlicedPass::Tensors SlicedPass::run(const LayerFunction& layer, size_t i, Passage& passage,
                                    bool again) const {
  const at::AutoGradMode with_gradients(true);
  std::optional<WithChoices> choices;
  if (recompute_) choices.emplace(passage.choices, again);
  const Tensors& in = passage.in;
  State state;
  state.context = {.handed = in.handed, .last = last(i)};
  for (const auto& [name, tensor] : in.state) state[name] = tensor;
  const at::Tensor y = layer(in.x, state);
  return {y, state.context.handed, last(i) ? Handed() : state.tensors()};
}

std::vector<at::Tensor> SlicedPass::forward(LayerFunction function,
                                            const std::vector<at::Tensor>& x) {
  const int64_t index = int64_t(layers_.size());
  layers_.push_back({std::move(function), {}});
  Layer& layer = layers_.back();
  std::vector<at::Tensor> y;
  Handed state;
  if (slices_.begin > 0) state = neighbours_->receive(index);
  for (size_t i = 0; i < x.size(); ++i) {
    Passage passage{{leaf(x[i]), leaves(handed[i]), leaves(state)}, {}, {}};
    Tensors out = run(layer.function, i, passage, /*again=*/false);
    y.push_back(out.x.detach());
    for (auto& [name, tensor] : out.handed) handed[i][name] = tensor.detach();
    if (i + 1 < x.size()) state = copied(out.state);
    else if (!last(i)) neighbours_->send(index, copied(out.state));
    if (!recompute_) passage.out = std::move(out);
    layer.passages.push_back(std::move(passage));
  }
  return y;
}

// Gradients of the state that slice begin + i of the layer left.
Handed SlicedPass::gradients_of_state(const Layer& layer, size_t i) const {
  if (last(i)) return {};
  if (i + 1 < layer.passages.size()) return copied(gradients_of(layer.passages[i + 1].in.state));
  Handed out;
  for (const auto& [name, tensor] : layer.passages[i].out.state)
    if (tensor.is_floating_point())
      out[name] = at::empty(tensor.sizes(), tensor.options().requires_grad(false));
  neighbours_->receive_gradients(values(out));
  return out;
}

std::vector<at::Tensor> SlicedPass::backward(const std::vector<at::Tensor>& dy,
                                             const std::function<void(size_t)>& done) {
  Layer layer = std::move(layers_.back());
  layers_.pop_back();
  std::vector<at::Tensor> dx(dy.size());
  for (size_t i = dy.size(); i-- > 0;) {
    Passage& passage = layer.passages[i];
    if (recompute_) passage.out = run(layer.function, i, passage, /*again=*/true);
    std::vector<at::Tensor> roots = {passage.out.x};
    std::vector<at::Tensor> root_gradients = {dy[i]};
    const auto add = [&](const Handed& tensors, const Handed& their_gradients) {
      for (const auto& [name, gradient] : their_gradients) {
        const at::Tensor& root = tensors.at(name);
        if (!root.requires_grad()) continue;
        roots.push_back(root);
        root_gradients.push_back(gradient);
      }
    };
    add(passage.out.handed, handed_gradients[i]);
    add(passage.out.state, gradients_of_state(layer, i));
    torch::autograd::backward(roots, root_gradients);
    passage.out = {};
    dx[i] = gradient_of(passage.in.x);
    handed_gradients[i] = gradients_of(passage.in.handed);
    if (i == 0 && slices_.begin > 0)
      neighbours_->send_gradients(values(copied(gradients_of(passage.in.state))));
    done(i);
  }
  return dx;
}

std::vector<at::Tensor> sliced_loss(LanguageModel& model, const at::Tensor& tokens,
                                    ContextSlices slices, Neighbours* neighbours, double divisor,
                                    const std::function<void(size_t)>& done) {
  const int64_t here = slices.end - slices.begin;
  const int64_t time = (tokens.size(1) - 1) / here;
  SlicedPass pass(slices, neighbours, model.recompute_activations);
  const at::Tensor no_auxiliary = model.no_auxiliary_loss();
  if (no_auxiliary.defined())
    for (Handed& of_slice : pass.handed) of_slice[Context::kAuxiliaryLoss] = no_auxiliary;
  std::vector<at::Tensor> embedded;
  std::vector<at::Tensor> x;
  std::vector<at::Tensor> losses;
  for (int64_t i = 0; i < here; ++i) {
    const ModelState state{.layers = {}, .position = (slices.begin + i) * time};
    embedded.push_back(model.embed(tokens.narrow(1, i * time, time), state));
    x.push_back(embedded.back().detach());
  }
  for (const auto& layer : model.layers)
    x = pass.forward(
        [layer, dtype = model.product_dtype()](const at::Tensor& h, State& state) {
          return layer->forward(h, state, dtype);
        },
        x);
  for (int64_t i = 0; i < here; ++i) {
    const at::Tensor output = leaf(x[size_t(i)]);
    const at::Tensor targets = tokens.narrow(1, i * time + 1, time);
    const at::Tensor loss = model.loss_of_hidden(model.normalised({output, {}}), targets) / divisor;
    loss.backward();
    done(size_t(i));
    std::vector<at::Tensor> all = {loss.detach()};
    if (no_auxiliary.defined()) {
      all.push_back(pass.handed[size_t(i)].at(Context::kAuxiliaryLoss).to(loss) / divisor);
      pass.handed_gradients[size_t(i)][Context::kAuxiliaryLoss] =
          at::full_like(no_auxiliary, 1 / divisor);
    }
    losses.push_back(at::stack(all));
    x[size_t(i)] = gradient_of(output);
  }
  for (size_t layer = model.layers.size(); layer-- > 0;) x = pass.backward(x, done);
  for (int64_t i = 0; i < here; ++i) {
    torch::autograd::backward({embedded[size_t(i)]}, {x[size_t(i)]});
    done(size_t(i));
  }
  if (here < slices.count) neighbours->finish();
  return losses;
}

}  // namespace assay::nn
