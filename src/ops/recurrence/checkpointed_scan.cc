#include "ops/recurrence/checkpointed_scan.h"

#include <torch/torch.h>

#include <algorithm>

namespace assay::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Cut : torch::CustomClassHolder {
  Cut(Piece p, int64_t t, int64_t l) : piece(std::move(p)), time(t), length(l) {}
  Piece piece;
  int64_t time;
  int64_t length;
  int64_t count() const { return (time + length - 1) / length; }
  int64_t steps(int64_t i) const { return std::min(length, time - i * length); }
  at::Tensor part(const at::Tensor& x, int64_t i) const {
    return is_sequence(x) ? x.narrow(1, i * length, steps(i)) : x;
  }
  bool is_sequence(const at::Tensor& x) const { return x.size(1) == time; }
};

// Gradients of (out, state) of one piece for every input, then for the state before it.
variable_list piece_gradients(const Cut& cut, const variable_list& inputs, const at::Tensor& before,
                              int64_t i, const at::Tensor& dout, const at::Tensor& dstate) {
  const at::AutoGradMode with_gradient(true);
  // leaves of this piece alone
  variable_list leaves;
  variable_list outputs;
  variable_list seeds;
  for (const at::Tensor& x : inputs) leaves.push_back(cut.part(x, i).detach().requires_grad_());
  const at::Tensor state = before.detach().requires_grad_();
  const auto [out, after] = cut.piece(leaves, state);
  leaves.push_back(state);
  if (dout.defined()) {
    outputs.push_back(out);
    seeds.push_back(cut.part(dout, i));
  }
  if (dstate.defined()) {
    outputs.push_back(after);
    seeds.push_back(dstate);
  }
  return torch::autograd::grad(outputs, leaves, seeds, {}, false, /*allow_unused=*/true);
}

struct Segments : torch::autograd::Function<Segments> {
  static variable_list forward(AutogradContext* ctx, const c10::intrusive_ptr<Cut>& cut,
                               at::TensorList inputs, const at::Tensor& initial_state) {
    variable_list saved = inputs.vec();
    variable_list outputs;
    variable_list parts(inputs.size());
    at::Tensor state = initial_state;
    for (int64_t i = 0; i < cut->count(); ++i) {
      saved.push_back(state);
      for (size_t n = 0; n < inputs.size(); ++n) parts[n] = cut->part(inputs[n], i);
      auto [out, after] = cut->piece(parts, state);
      outputs.push_back(out);
      state = after;
    }
    ctx->save_for_backward(saved);
    ctx->saved_data["cut"] = c10::IValue::make_capsule(cut);
    ctx->set_materialize_grads(false);
    return {outputs.size() == 1 ? outputs[0] : at::cat(outputs, 1), state};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto cut = c10::static_intrusive_pointer_cast<Cut>(ctx->saved_data["cut"].toCapsule());
    const variable_list saved = ctx->get_saved_variables();
    const int64_t count = cut->count();
    const int64_t size = int64_t(saved.size()) - count;
    const variable_list inputs(saved.begin(), saved.begin() + size);
    std::vector<variable_list> parts(size, variable_list(count));
    at::Tensor dstate = gradients[1];
    for (int64_t i = count - 1; i >= 0; --i) {
      const variable_list found =
          piece_gradients(*cut, inputs, saved[size + i], i, gradients[0], dstate);
      for (int64_t n = 0; n < size; ++n) parts[n][i] = found[n];
      dstate = found.back();
    }
    variable_list result{at::Tensor()};
    for (int64_t n = 0; n < size; ++n) result.push_back(join(*cut, inputs[n], parts[n]));
    result.push_back(dstate);
    return result;
  }

  // One gradient from those of the pieces: side by side for a sequence, their sum for what
  // all pieces share.
  static at::Tensor join(const Cut& cut, const at::Tensor& input, const variable_list& parts) {
    variable_list all;
    for (int64_t i = 0; i < cut.count(); ++i)
      all.push_back(parts[i].defined() ? parts[i] : at::zeros_like(cut.part(input, i)));
    if (cut.is_sequence(input)) return at::cat(all, 1);
    at::Tensor sum = all[0];
    for (size_t i = 1; i < all.size(); ++i) sum = sum + all[i];
    return sum;
  }
};

}  // namespace

std::tuple<at::Tensor, at::Tensor> scan_with_recompute(const Piece& piece,
                                                       const std::vector<at::Tensor>& sequences,
                                                       const at::Tensor& initial_state,
                                                       int64_t time, int64_t length) {
  variable_list present;  // the autograd function sees only these
  std::vector<bool> is_present;
  for (const at::Tensor& x : sequences) {
    is_present.push_back(x.defined());
    if (x.defined()) present.push_back(x);
  }
  const Piece of_present = [=](const variable_list& parts, const at::Tensor& state) {
    variable_list all;
    for (size_t next = 0; const bool is : is_present)
      all.push_back(is ? parts[next++] : at::Tensor());
    return piece(all, state);
  };
  const auto cut = c10::make_intrusive<Cut>(of_present, time, length);
  const variable_list out = Segments::apply(cut, at::TensorList(present), initial_state);
  return {out[0], out[1]};
}

}  // namespace assay::ops
