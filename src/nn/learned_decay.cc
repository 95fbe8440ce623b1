#include "nn/learned_decay.h"

#include <torch/torch.h>

#include "nn/layers.h"
#include "nn/recompute.h"

namespace assay::nn {
namespace {

// h_t = decay_t ⊙ h_{t−1} + input_t along dimension 1, h_{−1} = first.                         [Hillis & Steele 1986]
at::Tensor recurrence(at::Tensor decay, at::Tensor input, const at::Tensor& first) {
  const int64_t time = decay.size(1);
  for (int64_t reach = 1; reach < time; reach *= 2) {  // pairs now cover `reach` steps, then twice as many
    const at::Tensor later = decay.slice(1, reach);
    input = at::cat(
        {input.slice(1, 0, reach), at::addcmul(input.slice(1, reach), later, input.slice(1, 0, time - reach))}, 1);
    decay = at::cat({decay.slice(1, 0, reach), later * decay.slice(1, 0, time - reach)}, 1);
  }
  return at::addcmul(input, decay, first.unsqueeze(1));
}

// One piece; `named` holds its tensors and the state before it, then the state behind it alone.
at::Tensor piece(const at::Tensor& x, Handed& named) {
  const at::Tensor delta = named.at("delta"), decay = at::exp(-delta.unsqueeze(-1) * named.at("A").unsqueeze(2));
  const at::Tensor states =
      recurrence(decay, (delta * x).unsqueeze(-1) * named.at("B").unsqueeze(2), named.at("state"));
  const at::Tensor y = at::matmul(states, named.at("C").unsqueeze(-1)).squeeze(-1);
  named = {{"state", states.select(1, -1)}};
  return y;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> learned_decay_scan(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& A,
                                                      const at::Tensor& B, const at::Tensor& C,
                                                      const std::optional<at::Tensor>& state) {
  const at::Tensor input = wide(x);
  const auto real = input.options();
  at::Tensor carried = state ? state->to(real) : at::zeros({x.size(0), x.size(2), A.size(2)}, real);
  std::vector<at::Tensor> outputs;
  for (int64_t begin = 0; begin < x.size(1); begin += 64) {
    const auto part = [&](const at::Tensor& t) { return t.slice(1, begin, std::min(begin + 64, x.size(1))).to(real); };
    Handed named = {{"delta", part(delta)}, {"A", part(A)}, {"B", part(B)}, {"C", part(C)}, {"state", carried}};
    outputs.push_back(at::GradMode::is_enabled() ? recomputed(piece, part(input), named) : piece(part(input), named));
    carried = named.at("state");
  }
  return {at::cat(outputs, 1).to(x.scalar_type()), carried};
}

}  // namespace assay::nn
