#include <torch/torch.h>

#include "ops/recurrence/recurrence_reference.h"
#include "ops/recurrence/ssd/ssd.h"

namespace assay::ops {

std::tuple<at::Tensor, at::Tensor> ssd_reference(const at::Tensor& x, const at::Tensor& dt,
                                                 const at::Tensor& A, const at::Tensor& B,
                                                 const at::Tensor& C, const OptionalTensor& D,
                                                 const OptionalTensor& z,
                                                 const OptionalTensor& dt_bias, bool dt_softplus,
                                                 const OptionalTensor& initial_state) {
  const auto real = real_dtype(sequence_dtype({x, dt, B, C, or_undefined(z)}));
  const int64_t heads = x.size(2);
  at::Tensor delta = dt.to(real);
  if (dt_bias) delta = delta + dt_bias->to(real);
  if (dt_softplus) delta = at::softplus(delta);
  const auto decays = at::exp(delta * A.to(real)).unsqueeze(-1).unsqueeze(-1).unbind(1);
  const auto inputs = (delta.unsqueeze(-1) * x.to(real)).unbind(1);
  const auto in = with_heads(B.to(real), heads).unbind(1);
  const auto out = with_heads(C.to(real), heads).unbind(1);
  auto [y, state] = step_by_step(
      x.size(1), first_state(initial_state, {x.size(0), heads, x.size(3), B.size(3)}, real, x),
      [&](int64_t t, const at::Tensor& before) {
        const at::Tensor after = decays[t] * before + outer_product(inputs[t], in[t]);
        return std::pair(at::matmul(after, out[t].unsqueeze(-1)).squeeze(-1), after);
      });
  if (D) y = y + D->to(real).unsqueeze(-1) * x.to(real);
  if (z) y = y * at::silu(z->to(real));
  return {y.to(x.scalar_type()), state};
}

}  // namespace assay::ops
