#include "nn/lm_loss.h"

#include <torch/torch.h>

#include "ops/dense/cross_entropy/cross_entropy.h"
#include "ops/dense/linear/linear.h"

namespace assay::nn {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// Rows of logits at a time: enough to keep the matrix unit busy, few enough to stay in cache (CPU)
// or spare memory (GPU). On a GPU the parts are equal: a short last one would leave SMs idle.
int64_t rows_at_once(const Tensor& hidden, int64_t vocabulary) {
  const int64_t elements = hidden.is_cuda() ? int64_t{1} << 28 : int64_t{1} << 22;
  const int64_t most = std::max<int64_t>(64, elements / vocabulary);
  const int64_t count = hidden.size(0);
  if (!hidden.is_cuda() || count == 0) return most;
  const int64_t parts = (count + most - 1) / most;
  return (count + parts - 1) / parts;
}

struct LmLoss : torch::autograd::Function<LmLoss> {
  static Tensor forward(AutogradContext* context, const Tensor& hidden, const Tensor& master,
                        const Tensor& targets) {
    const Tensor weight = master.to(hidden.scalar_type());
    const int64_t count = hidden.size(0);
    const int64_t rows = rows_at_once(hidden, weight.size(0));
    Tensor loss =
        at::zeros({}, hidden.options().dtype(at::promote_types(hidden.scalar_type(), at::kFloat)));
    Tensor dhidden = at::empty_like(hidden);
    Tensor dweight = at::zeros(master.sizes(), master.options());
    for (int64_t begin = 0; begin < count; begin += rows) {
      const int64_t end = std::min(begin + rows, count);
      const Tensor h = hidden.slice(0, begin, end);
      const Tensor logits = ops::product(h, weight);
      loss += ops::cross_entropy_(logits, targets.slice(0, begin, end), 1.0 / double(count)).sum();
      const Tensor& dlogits = logits;  // in their place
      Tensor dh = dhidden.slice(0, begin, end);
      if (dh.is_cuda()) at::mm_out(dh, dlogits, weight);
      else dh.copy_(ops::product(dlogits, weight.t()));
      ops::weight_gradient(dlogits, h, dweight, /*add=*/true);
    }
    context->save_for_backward({dhidden, dweight});
    return loss / double(count);
  }

  static variable_list backward(AutogradContext* context, variable_list gradient) {
    const auto saved = context->get_saved_variables();
    const auto scaled = [&](const Tensor& x) { return x * gradient[0].to(x.scalar_type()); };
    return {scaled(saved[0]), scaled(saved[1]), Variable()};
  }
};

}  // namespace

Tensor lm_loss(const Tensor& hidden, const Tensor& weight, const Tensor& targets) {
  return LmLoss::apply(hidden, weight, targets);
}

TokenScores score_tokens(const Tensor& hidden, const Tensor& master, const Tensor& targets,
                         bool greedy) {
  const at::NoGradGuard no_grad;
  const Tensor weight = master.to(hidden.scalar_type());
  const int64_t rows = rows_at_once(hidden, weight.size(0));
  std::vector<Tensor> losses;
  std::vector<Tensor> likeliest;
  for (int64_t begin = 0; begin < hidden.size(0); begin += rows) {
    const auto part = [&](const Tensor& x) {
      return x.slice(0, begin, std::min(begin + rows, hidden.size(0)));
    };
    const Tensor logits =
        ops::linear(part(hidden), weight, {}, weight.is_same(master)).contiguous();
    losses.push_back(ops::cross_entropy(logits, part(targets)));
    if (greedy) likeliest.push_back(logits.argmax(1));
  }
  return {at::cat(losses), greedy ? at::cat(likeliest) == targets : Tensor()};
}

}  // namespace assay::nn
