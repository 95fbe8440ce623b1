#include "nn/context.h"

#include <torch/torch.h>

#include <span>

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

std::vector<at::Tensor> leaves(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> out;
  for (const at::Tensor& tensor : tensors) out.push_back(leaf(tensor));
  return out;
}
std::vector<at::Tensor> firsts(const std::vector<std::vector<at::Tensor>>& lists) {
  std::vector<at::Tensor> out;
  for (const auto& list : lists) out.push_back(list.front());
  return out;
}

// [B, T, …] → [count, B, T / count, …], and back.
at::Tensor cut(const at::Tensor& x, int64_t count) {
  return x.unflatten(1, {count, -1}).transpose(0, 1);
}
at::Tensor joined(const at::Tensor& slices) { return slices.transpose(0, 1).flatten(1, 2); }

std::vector<at::Tensor> values(const Handed& tensors) {
  std::vector<at::Tensor> out;
  for (const auto& [name, tensor] : tensors) out.push_back(tensor);
  return out;
}

}  // namespace

SlicedPass::Tensors SlicedPass::run(const Function& function, size_t i, Passage& passage,
                                    bool again) const {
  const at::AutoGradMode with_gradients(true);
  std::optional<WithChoices> choices;
  if (recompute_) choices.emplace(passage.choices, again);
  const Tensors& in = passage.in;
  State state;
  state.context = {.handed = in.handed, .last = last(i)};
  for (const auto& [name, tensor] : in.state) state[name] = tensor;
  const List y = function(in.x, state);
  return {y, state.context.handed, last(i) ? Handed() : state.tensors()};
}

std::vector<at::Tensor> SlicedPass::forward(const SlicedLayer& sliced,
                                            const std::vector<at::Tensor>& x) {
  Layer& layer = layers_.emplace_back();
  std::vector<List> in;
  for (const at::Tensor& of_slice : x) in.push_back({of_slice});
  if (!sliced.attention) {
    const auto whole = [call = sliced.forward](const List& own, State& state) {
      return List{call(own[0], state)};
    };
    return firsts(forward(layer, whole, in));
  }
  // → x, the gate if there is one, queries, keys, values
  const auto before = [call = sliced.head_inputs](const List& own, State& state) {
    const auto [heads, gate] = call(own[0], state);
    List out = own;
    if (gate.defined()) out.push_back(gate);
    out.insert(out.end(), heads.begin(), heads.end());
    return out;
  };
  const auto after = [call = sliced.after_attention](const List& own, State& state) {
    return List{call(own[0], own.back(), own.size() > 2 ? own[1] : at::Tensor(), state)};
  };
  std::vector<List> lists = forward(layer, before, in);
  const std::vector<at::Tensor> attended = attend(layer, *sliced.attention, lists);
  for (size_t i = 0; i < lists.size(); ++i) {
    lists[i].resize(lists[i].size() - 3);
    lists[i].push_back(attended[i]);
  }
  return firsts(forward(layer, after, lists));
}

std::vector<SlicedPass::List> SlicedPass::forward(Layer& layer, Function function,
                                                  const std::vector<List>& x) {
  Stage& stage = layer.stages.emplace_back(std::move(function));
  const int64_t index = stages_++;
  std::vector<List> y;
  Handed state;
  if (slices_.begin > 0) state = neighbours_->receive(index);
  for (size_t i = 0; i < x.size(); ++i) {
    Passage passage{{leaves(x[i]), leaves(handed[i]), leaves(state)}, {}, {}};
    Tensors out = run(stage.function, i, passage, /*again=*/false);
    List& values_of_slice = y.emplace_back();
    for (const at::Tensor& tensor : out.x) values_of_slice.push_back(tensor.detach());
    for (auto& [name, tensor] : out.handed) handed[i][name] = tensor.detach();
    if (i + 1 < x.size()) state = copied(out.state);
    else if (!last(i)) neighbours_->send(index, copied(out.state));
    if (!recompute_) passage.out = std::move(out);
    stage.passages.push_back(std::move(passage));
  }
  return y;
}

// Gradients of the state that slice begin + i of the stage left.
Handed SlicedPass::gradients_of_state(const Stage& stage, size_t i) const {
  if (last(i)) return {};
  if (i + 1 < stage.passages.size()) return copied(gradients_of(stage.passages[i + 1].in.state));
  Handed out;
  for (const auto& [name, tensor] : stage.passages[i].out.state)
    if (tensor.is_floating_point())
      out[name] = at::empty(tensor.sizes(), tensor.options().requires_grad(false));
  neighbours_->receive_gradients(values(out));
  return out;
}

std::vector<at::Tensor> SlicedPass::backward(const std::vector<at::Tensor>& dy,
                                             const std::function<void(size_t)>& done) {
  Layer layer = std::move(layers_.back());
  layers_.pop_back();
  stages_ -= int64_t(layer.stages.size());
  std::vector<List> gradients;
  for (const at::Tensor& of_slice : dy) gradients.push_back({of_slice});
  gradients = backward(std::move(layer.stages.back()), gradients, done);
  if (layer.stages.size() == 1) return firsts(gradients);
  std::vector<at::Tensor> of_attended;
  for (List& of_slice : gradients) {
    of_attended.push_back(of_slice.back());
    of_slice.pop_back();
  }
  const std::vector<List> heads = attend_backward(layer, of_attended);
  layer.attended.clear();
  for (size_t i = 0; i < gradients.size(); ++i)
    gradients[i].insert(gradients[i].end(), heads[i].begin(), heads[i].end());
  return firsts(backward(std::move(layer.stages.front()), gradients, done));
}

std::vector<SlicedPass::List> SlicedPass::backward(Stage stage, const std::vector<List>& dy,
                                                   const std::function<void(size_t)>& done) {
  std::vector<List> dx(dy.size());
  for (size_t i = dy.size(); i-- > 0;) {
    Passage& passage = stage.passages[i];
    if (recompute_) passage.out = run(stage.function, i, passage, /*again=*/true);
    List roots = passage.out.x;
    List root_gradients = dy[i];
    const auto add = [&](const Handed& tensors, const Handed& their_gradients) {
      for (const auto& [name, gradient] : their_gradients) {
        const at::Tensor& root = tensors.at(name);
        if (!root.requires_grad()) continue;
        roots.push_back(root);
        root_gradients.push_back(gradient);
      }
    };
    add(passage.out.handed, handed_gradients[i]);
    add(passage.out.state, gradients_of_state(stage, i));
    torch::autograd::backward(roots, root_gradients);
    passage.out = {};
    for (const at::Tensor& x : passage.in.x) dx[i].push_back(gradient_of(x));
    handed_gradients[i] = gradients_of(passage.in.handed);
    if (i == 0 && slices_.begin > 0)
      neighbours_->send_gradients(values(copied(gradients_of(passage.in.state))));
    done(i);
  }
  return dx;
}

// blocks [all slices, …] of each slice of this process.
at::Tensor SlicedPass::transposed(const std::vector<at::Tensor>& blocks) const {
  const at::Tensor rows = at::stack(blocks);
  return rows.size(0) == slices_.count ? rows.transpose(0, 1) : neighbours_->transposed(rows);
}

// lists: queries, keys and values last, by slice of this process. → [B, T / count, H D]
std::vector<at::Tensor> SlicedPass::attend(Layer& layer, HeadwiseMixer& attention,
                                           const std::vector<List>& lists) {
  const int64_t count = slices_.count;
  std::vector<at::Tensor> blocks;
  for (const List& of_slice : lists) {
    List divided;  // [B, T / count, count, n, D]
    for (const at::Tensor& heads : std::span(of_slice).last(3))
      divided.push_back(heads.unflatten(2, {count, -1}));
    if (layer.heads.empty())
      for (const at::Tensor& heads : divided) layer.heads.push_back(heads.size(3));
    blocks.push_back(at::cat(divided, 3).movedim(2, 0));
  }
  const at::Tensor shares = transposed(blocks);  // [share here, slice, B, T / count, n, D]
  std::vector<at::Tensor> results;
  for (int64_t share = 0; share < shares.size(0); ++share) {
    const at::AutoGradMode with_gradients(true);
    const at::Tensor in = leaf(joined(shares[share]));
    const List heads = in.split_with_sizes(layer.heads, 2);
    const int64_t first = (slices_.begin + share) * layer.heads[0];
    const at::Tensor y = attention.attend_whole({heads[0], heads[1], heads[2]}, first);
    layer.attended.push_back({in, y});
    results.push_back(cut(y.detach(), count));
  }
  std::vector<at::Tensor> out;
  for (const at::Tensor& of_slice : transposed(results).unbind())  // [share, B, T / count, h, D]
    out.push_back(of_slice.movedim(0, 2).flatten(2));
  return out;
}

// From the gradients of attend()'s results to those of the queries, keys and values of each slice.
std::vector<SlicedPass::List> SlicedPass::attend_backward(const Layer& layer,
                                                          const std::vector<at::Tensor>& dy) {
  const int64_t count = slices_.count;
  std::vector<at::Tensor> blocks;
  for (const at::Tensor& of_slice : dy)
    blocks.push_back(of_slice.unflatten(2, {count, layer.heads[0], -1}).movedim(2, 0));
  const at::Tensor shares = transposed(blocks);
  std::vector<at::Tensor> results;
  for (size_t share = 0; share < layer.attended.size(); ++share) {
    const auto& [in, y] = layer.attended[share];
    torch::autograd::backward({y}, {joined(shares[int64_t(share)])});
    results.push_back(cut(gradient_of(in), count));
  }
  std::vector<List> gradients;
  for (const at::Tensor& of_slice : transposed(results).unbind()) {
    List& of_heads = gradients.emplace_back();
    for (const at::Tensor& x : of_slice.movedim(0, 2).split_with_sizes(layer.heads, 3))
      of_heads.push_back(x.flatten(2, 3));
  }
  return gradients;
}

namespace {

SlicedLayer sliced(const std::shared_ptr<Layer>& layer, at::ScalarType dtype, int64_t count) {
  SlicedLayer out;
  out.forward = [=](const at::Tensor& x, State& state) { return layer->forward(x, state, dtype); };
  if (!layer->attention || !layer->attention->divides_heads(count)) return out;
  out.attention = layer->attention;
  out.head_inputs = [=](const at::Tensor& x, State& state) {
    return layer->head_inputs(x, state, dtype);
  };
  out.after_attention = [=](const at::Tensor& x, const at::Tensor& attended, const at::Tensor& gate,
                            State& state) {
    return layer->after_attention(x, attended, gate, state, dtype);
  };
  return out;
}

}  // namespace

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
    x = pass.forward(sliced(layer, model.product_dtype(), slices.count), x);
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
