#include "nn/context.h"

#include <torch/torch.h>

#include <algorithm>

namespace assay::nn {
namespace {

// Parts of a share of the heads: one attends while another one is sent.
constexpr int64_t kGroups = 2;

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

// Whether x can be viewed as elements of 16 bytes.
bool has_wide_elements(const at::Tensor& x) {
  const int64_t each = 16 / x.element_size();
  const auto whole = [&](int64_t elements) { return elements % each == 0; };
  return x.stride(-1) == 1 && whole(x.size(-1)) && whole(x.storage_offset()) &&
         std::ranges::all_of(x.strides().slice(0, size_t(x.dim() - 1)), whole);
}
// Between tensors with other strides torch copies one element per thread, so the elements are the
// widest possible ones.
void copy_into(at::Tensor to, const at::Tensor& from) {
  if (!has_wide_elements(to) || !has_wide_elements(from)) to.copy_(from);
  else to.view(at::kComplexDouble).copy_(from.view(at::kComplexDouble));
}
// at::stack(parts), without a copy if there is one part and it is contiguous.
at::Tensor packed(const std::vector<at::Tensor>& parts) {
  const at::Tensor& first = parts.front();
  if (parts.size() == 1 && first.is_contiguous()) return first.unsqueeze(0);
  std::vector<int64_t> sizes = first.sizes().vec();
  sizes.insert(sizes.begin(), int64_t(parts.size()));
  const at::Tensor out = at::empty(sizes, first.options().requires_grad(false));
  for (size_t i = 0; i < parts.size(); ++i) copy_into(out[int64_t(i)], parts[i]);
  return out;
}

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

bool attends_at_once(const HeadwiseMixer* attention, int64_t count, int64_t time) {
  if (!attention) return false;
  return attention->divides_heads(count) || (attention->reach() >= 0 && attention->reach() <= time);
}

std::vector<at::Tensor> SlicedPass::forward(const SlicedLayer& sliced,
                                            const std::vector<at::Tensor>& x) {
  Layer& layer = layers_.emplace_back();
  layer.attention = sliced.attention;
  std::vector<List> in;
  for (const at::Tensor& of_slice : x) in.push_back({of_slice});
  if (!sliced.attention) {
    const auto whole = [call = sliced.forward](const List& own, State& state) {
      return List{call(own[0], state)};
    };
    return firsts(forward(layer, whole, in));
  }
  // → x, the gate if there is one, head inputs
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
  const std::vector<at::Tensor> attended =
      divides_heads(layer) ? attend_with_shares(layer, lists) : attend_within_reach(layer, lists);
  for (size_t i = 0; i < lists.size(); ++i) {
    lists[i].resize(lists[i].size() - layer.attention->num_head_inputs());
    lists[i].push_back(attended[i]);
  }
  return firsts(forward(layer, after, lists));
}

std::vector<SlicedPass::List> SlicedPass::forward(Layer& layer, Function function,
                                                  const std::vector<List>& x) {
  Stage& stage = layer.stages.emplace_back(std::move(function));
  const int64_t index = exchanges_++;
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
  exchanges_ -= int64_t(layer.stages.size()) + (layer.attention && !divides_heads(layer));
  std::vector<List> gradients;
  for (const at::Tensor& of_slice : dy) gradients.push_back({of_slice});
  gradients = backward(std::move(layer.stages.back()), gradients, done);
  if (layer.stages.size() == 1) return firsts(gradients);
  std::vector<at::Tensor> of_attended;
  for (List& of_slice : gradients) {
    of_attended.push_back(of_slice.back());
    of_slice.pop_back();
  }
  const std::vector<List> heads = divides_heads(layer)
                                      ? attend_with_shares_backward(layer, of_attended, done)
                                      : attend_within_reach_backward(layer, of_attended, done);
  layer.attended.clear();
  layer.shares.clear();
  for (size_t i = 0; i < gradients.size(); ++i)
    gradients[i].insert(gradients[i].end(), heads[i].begin(), heads[i].end());
  return firsts(backward(std::move(layer.stages.front()), gradients, done));
}

std::vector<SlicedPass::List> SlicedPass::backward(Stage stage, const std::vector<List>& dy,
                                                   const std::function<void(size_t)>& done) {
  std::vector<List> dx(dy.size());
  for (size_t i = dy.size(); i-- > 0;) {
    Passage& passage = stage.passages[i];
    if (recompute_ && passage.out.x.empty())
      passage.out = run(stage.function, i, passage, /*again=*/true);
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

SlicedPass::Wait SlicedPass::transpose(const at::Tensor& blocks) const {
  if (blocks.size(0) < slices_.count) return neighbours_->transpose(blocks);
  return [blocks] { return blocks.transpose(0, 1); };
}

// Starts to exchange x [B, T / count, heads, …] of each slice of this process, the part that
// `group` has of each share of the heads. shares_of() waits: [B, T, heads of a group, …] of each
// share of this process.
SlicedPass::Wait SlicedPass::start_shares(const List& slices, int64_t groups, int64_t group) const {
  List parts;
  for (const at::Tensor& x : slices)
    parts.push_back(x.unflatten(2, {slices_.count, groups, -1}).select(3, group).movedim(2, 0));
  return transpose(packed(parts));
}
SlicedPass::List SlicedPass::shares_of(const Wait& wait) const {
  List shares;
  for (const at::Tensor& share : wait().unbind())  // [count, B, T / count, …]
    shares.push_back(packed({share.transpose(0, 1)})[0].flatten(1, 2));
  return shares;
}
// The reverse. slices_of() waits for all groups: [B, T / count, heads, …] of each slice.
SlicedPass::Wait SlicedPass::start_slices(const List& shares) const {
  List parts;
  for (const at::Tensor& x : shares)
    parts.push_back(x.unflatten(1, {slices_.count, -1}).transpose(0, 1));
  return transpose(packed(parts));
}
SlicedPass::List SlicedPass::slices_of(const std::vector<Wait>& groups) const {
  List slices;
  for (size_t g = 0; g < groups.size(); ++g) {
    const List of_group = groups[g]().unbind();
    for (size_t i = 0; i < of_group.size(); ++i) {
      const at::Tensor heads = of_group[i].movedim(0, 2);  // [B, T / count, count, heads, …]
      std::vector<int64_t> sizes = heads.sizes().vec();
      sizes.insert(sizes.begin() + 3, int64_t(groups.size()));
      if (g == 0) slices.push_back(at::empty(sizes, heads.options()));
      copy_into(slices[i].select(3, int64_t(g)), heads);
    }
  }
  for (at::Tensor& x : slices) x = x.flatten(2, 4);
  return slices;
}

// lists: head inputs last, by slice of this process. → [B, T / count, H D]
std::vector<at::Tensor> SlicedPass::attend_with_shares(Layer& layer,
                                                       const std::vector<List>& lists) {
  const size_t inputs = layer.attention->num_head_inputs();
  const int64_t groups = layer.attention->divides_heads(kGroups * slices_.count) ? kGroups : 1;
  std::vector<std::vector<Wait>> sent(static_cast<size_t>(groups));  // by group and input
  for (int64_t g = 0; g < groups; ++g)
    for (size_t n = inputs; n > 0; --n) {
      List slices;
      for (const List& of_slice : lists) slices.push_back(of_slice[of_slice.size() - n]);
      sent[size_t(g)].push_back(start_shares(slices, groups, g));
    }
  layer.shares.resize(sent.size());
  std::vector<Wait> results;
  for (int64_t g = 0; g < groups; ++g) {
    std::vector<Attended>& shares = layer.shares[size_t(g)];
    shares.resize(lists.size());
    for (const Wait& wait : sent[size_t(g)]) {
      const List of_input = shares_of(wait);
      for (size_t i = 0; i < shares.size(); ++i) shares[i].in.push_back(leaf(of_input[i]));
    }
    List outputs;
    for (size_t i = 0; i < shares.size(); ++i) {
      const at::AutoGradMode with_gradients(true);
      const int64_t part = (slices_.begin + int64_t(i)) * groups + g;
      shares[i].out = layer.attention->attend_whole(shares[i].in, part * shares[i].in[0].size(2));
      outputs.push_back(shares[i].out.detach());
    }
    results.push_back(start_slices(outputs));
  }
  List out;
  for (const at::Tensor& of_slice : slices_of(results)) out.push_back(of_slice.flatten(2));
  return out;
}

// From the gradients of the results to those of the head inputs of each slice.
std::vector<SlicedPass::List> SlicedPass::attend_with_shares_backward(
    const Layer& layer, const std::vector<at::Tensor>& dy,
    const std::function<void(size_t)>& done) {
  const auto groups = int64_t(layer.shares.size());
  List slices;
  for (const at::Tensor& of_slice : dy)
    slices.push_back(of_slice.unflatten(2, {-1, layer.shares[0][0].out.size(3)}));
  std::vector<Wait> sent;
  for (int64_t g = 0; g < groups; ++g) sent.push_back(start_shares(slices, groups, g));
  std::vector<std::vector<Wait>> results(layer.attention->num_head_inputs());  // and by group
  for (size_t g = 0; g < sent.size(); ++g) {
    const std::vector<Attended>& attended = layer.shares[g];
    const List shares = shares_of(sent[g]);
    for (size_t i = 0; i < shares.size(); ++i) {
      torch::autograd::backward({attended[i].out}, {shares[i]});
      done(i);
    }
    for (size_t n = 0; n < results.size(); ++n) {
      List of_input;
      for (const Attended& share : attended) of_input.push_back(gradient_of(share.in[n]));
      results[n].push_back(start_slices(of_input));
    }
  }
  std::vector<List> gradients(dy.size());
  for (const std::vector<Wait>& of_groups : results) {
    const List of_input = slices_of(of_groups);
    for (size_t i = 0; i < gradients.size(); ++i) gradients[i].push_back(of_input[i]);
  }
  return gradients;
}

// of_slice: queries, keys and values last. → [B, T / count, H D]
at::Tensor SlicedPass::attend(const Layer& layer, const List& of_slice, Attended& attended) const {
  const at::AutoGradMode with_gradients(true);
  const size_t size = of_slice.size();
  at::Tensor past_and_own = at::cat({of_slice[size - 2], of_slice[size - 1]}, 2).detach();
  if (attended.past.defined()) past_and_own = at::cat({attended.past, past_and_own}, 1);
  attended.in = {leaf(of_slice[size - 3]), leaf(past_and_own)};
  const auto keys_and_values = attended.in[1].chunk(2, 2);
  attended.out =
      layer.attention->attend_whole({attended.in[0], keys_and_values[0], keys_and_values[1]}, 0);
  return attended.out.detach().flatten(2);
}

std::vector<at::Tensor> SlicedPass::attend_within_reach(Layer& layer,
                                                        const std::vector<List>& lists) {
  const int64_t index = exchanges_++;
  const int64_t reach = layer.attention->reach();
  layer.attended.resize(lists.size());
  for (size_t i = 0; i < lists.size(); ++i) {
    if (last(i)) continue;
    const List& of_slice = lists[i];
    const at::Tensor& keys = of_slice[of_slice.size() - 2];
    const int64_t first = keys.size(1) - reach;
    const at::Tensor read_later =
        copied(at::cat({keys.slice(1, first), of_slice.back().slice(1, first)}, 2));
    if (i + 1 < lists.size()) layer.attended[i + 1].past = read_later;
    else neighbours_->send(index, {{"keys and values", read_later}});
  }
  if (slices_.begin > 0) layer.attended[0].past = neighbours_->receive(index).begin()->second;
  std::vector<at::Tensor> out;
  for (size_t i = 0; i < lists.size(); ++i) {
    out.push_back(attend(layer, lists[i], layer.attended[i]));
    if (recompute_) layer.attended[i] = {{}, {}, layer.attended[i].past};
  }
  return out;
}

std::vector<SlicedPass::List> SlicedPass::attend_within_reach_backward(
    Layer& layer, const std::vector<at::Tensor>& dy, const std::function<void(size_t)>& done) {
  std::vector<at::Tensor> of_queries;
  std::vector<at::Tensor> of_keys_and_values;
  at::Tensor of_past;  // of the keys and values before the slices of this process
  const auto add_to_last = [&](const at::Tensor& gradient) {
    const at::Tensor& all = of_keys_and_values.back();
    all.narrow(1, all.size(1) - gradient.size(1), gradient.size(1)).add_(gradient);
  };
  for (size_t i = 0; i < dy.size(); ++i) {
    Attended& attended = layer.attended[i];
    Passage& before = layer.stages.front().passages[i];
    if (recompute_) {
      before.out = run(layer.stages.front().function, i, before, /*again=*/true);
      attend(layer, before.out.x, attended);
    }
    torch::autograd::backward({attended.out}, {dy[i].view_as(attended.out)});
    done(i);
    const at::Tensor all = gradient_of(attended.in[1]);
    const int64_t past = attended.past.defined() ? attended.past.size(1) : 0;
    if (i > 0) add_to_last(all.narrow(1, 0, past));
    else of_past = copied(all.narrow(1, 0, past));
    of_queries.push_back(gradient_of(attended.in[0]));
    of_keys_and_values.push_back(all.slice(1, past));
    attended = {};
  }
  if (slices_.begin > 0) neighbours_->send_gradients({of_past});
  if (!last(dy.size() - 1)) {
    const at::Tensor& all = of_keys_and_values.back();
    const at::Tensor later =
        at::empty_like(all.narrow(1, 0, layer.attention->reach()), at::MemoryFormat::Contiguous);
    neighbours_->receive_gradients({later});
    add_to_last(later);
  }
  std::vector<List> gradients;
  for (size_t i = 0; i < dy.size(); ++i) {
    const auto keys_and_values = of_keys_and_values[i].chunk(2, 2);
    gradients.push_back({of_queries[i], keys_and_values[0], keys_and_values[1]});
  }
  return gradients;
}

namespace {

SlicedLayer sliced(const std::shared_ptr<Layer>& layer, at::ScalarType dtype, int64_t count,
                   int64_t time) {
  SlicedLayer out;
  out.forward = [=](const at::Tensor& x, State& state) { return layer->forward(x, state, dtype); };
  if (!attends_at_once(layer->attention, count, time)) return out;
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
    x = pass.forward(sliced(layer, model.product_dtype(), slices.count, time), x);
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
