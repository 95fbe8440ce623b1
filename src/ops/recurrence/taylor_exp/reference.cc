#include <torch/torch.h>

#include <algorithm>

#include "ops/recurrence/recurrence_reference.h"
#include "ops/recurrence/taylor_exp/taylor_exp.h"

namespace assay::ops {

at::Tensor taylor_exp_features(const at::Tensor& x) {
  const int64_t dim = x.size(-1);
  const at::Tensor pair = at::triu_indices(dim, dim, 0, x.options().dtype(at::kLong));
  const at::Tensor rows =
      // [K, n]: whole rows are picked and multiplied, not numbers
      x.flatten(0, -2).t().contiguous();
  const at::Tensor squares = rows.index_select(0, pair[0]) * rows.index_select(0, pair[1]);
  const at::Tensor features =
      at::cat({at::ones_like(rows.narrow(0, 0, 1)), rows, squares}).t().contiguous();
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = features.size(1);
  return features.view(shape);
}

at::Tensor taylor_exp_weights(int64_t key_dim, double scale, const at::TensorOptions& options) {
  const at::Tensor pair = at::triu_indices(key_dim, key_dim, 0, options.dtype(at::kLong));
  const at::Tensor once =
      // x_i x_j stands for x_j x_i as well, x_i² for itself
      (pair[0] == pair[1]).to(options.dtype());
  return at::cat({at::ones({1}, options), at::full({key_dim}, scale, options),
                  scale * scale * (1 - once / 2)});
}

std::tuple<at::Tensor, at::Tensor> taylor_exp_attention_reference(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale, bool normalize,
    double eps, const OptionalTensor& initial_state) {
  const auto real = real_dtype(sequence_dtype({q, k, v}));
  const int64_t heads = std::max({q.size(2), k.size(2), v.size(2)});
  const int64_t value_dim = v.size(3);
  const at::Tensor weights = taylor_exp_weights(q.size(3), scale, q.options().dtype(real));
  const auto Q = (with_heads(taylor_exp_features(q.to(real)), heads) * weights).unbind(1);
  const auto K = with_heads(taylor_exp_features(k.to(real)), heads).unbind(1);
  const at::Tensor value = with_heads(v.to(real), heads);
  const auto V = at::cat({value, at::ones_like(value.narrow(-1, 0, 1))}, -1).unbind(1);
  auto [sums, state] = step_by_step(
      q.size(1),
      first_state(initial_state, {q.size(0), heads, weights.size(0), value_dim + 1}, real, q),
      [&](int64_t t, const at::Tensor& before) {
        const at::Tensor after = before + outer_product(K[t], V[t]);
        return std::pair(read_state(after, Q[t]), after);
      });
  at::Tensor out = sums.narrow(-1, 0, value_dim);
  if (normalize) out = out / (sums.narrow(-1, value_dim, 1) + eps);
  return {out.to(q.scalar_type()), state};
}

}  // namespace assay::ops
