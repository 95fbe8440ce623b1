#include <torch/torch.h>

#include "ops/recurrence/longhorn/longhorn.h"
#include "ops/recurrence/recurrence_reference.h"

namespace assay::ops {

std::tuple<at::Tensor, at::Tensor> longhorn_reference(const at::Tensor& x, const at::Tensor& dt,
                                                      const at::Tensor& k, const at::Tensor& q,
                                                      const OptionalTensor& D,
                                                      const OptionalTensor& z,
                                                      const OptionalTensor& dt_bias, bool exact,
                                                      const OptionalTensor& initial_state) {
  const auto real = real_dtype(sequence_dtype({x, dt, k, q, or_undefined(z)}));
  const at::Tensor key = k.to(real);
  const at::Tensor input = x.to(real);
  const at::Tensor beta = at::sigmoid(dt_bias ? dt.to(real) + dt_bias->to(real) : dt.to(real));
  const at::Tensor epsilon = (beta / (1 + beta * key.square().sum(-1, true))).expand(x.sizes());
  // [B, 1, N], [B, N, 1]
  const auto K = key.unsqueeze(2).unbind(1);
  const auto Q = q.to(real).unsqueeze(-1).unbind(1);
  // [B, Dm, 1]
  const auto rate = epsilon.unsqueeze(-1).unbind(1);
  const auto X = input.unsqueeze(-1).unbind(1);
  auto [y, state] = step_by_step(
      x.size(1), first_state(initial_state, {x.size(0), x.size(2), k.size(2)}, real, x),
      [&](int64_t t, const at::Tensor& before) {
        // part of the state that the update removes: a row of S k kᵀ, or S ⊙ k²
        const at::Tensor held =
            exact ? at::matmul(before, K[t].transpose(1, 2)) * K[t] : before * K[t].square();
        const at::Tensor after = before + rate[t] * (X[t] * K[t] - held);
        return std::pair(at::matmul(after, Q[t]).squeeze(-1), after);
      });
  if (D) y = y + D->to(real) * input;
  if (z) y = y * at::silu(z->to(real));
  return {y.to(x.scalar_type()), state};
}

}  // namespace assay::ops
