#include <torch/torch.h>

#include "ops/recurrence/delta_rule/delta_rule.h"
#include "ops/recurrence/recurrence_reference.h"

namespace assay::ops {

std::tuple<at::Tensor, at::Tensor> gated_delta_rule_reference(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
    const at::Tensor& beta, double scale, const OptionalTensor& initial_state) {
  const auto real = real_dtype(sequence_dtype({q, k, v, g, beta}));
  const int64_t heads = beta.size(2);
  const auto Q = with_heads(q.to(real), heads).unbind(1);
  const auto K = with_heads(k.to(real), heads).unbind(1);
  const auto V = with_heads(v.to(real), heads).unbind(1);
  const auto rate = beta.to(real).unsqueeze(-1).unbind(1);
  const auto decay = at::exp(g.to(real)).unsqueeze(-1).unsqueeze(-1).unbind(1);
  auto [out, state] = step_by_step(
      q.size(1), first_state(initial_state, {q.size(0), heads, q.size(3), v.size(3)}, real, q),
      [&](int64_t t, const at::Tensor& before) {
        const at::Tensor decayed = decay[t] * before;
        const at::Tensor after =
            decayed + outer_product(K[t], rate[t] * (V[t] - read_state(decayed, K[t])));
        return std::pair(scale * read_state(after, Q[t]), after);
      });
  return {out.to(q.scalar_type()), state};
}

std::tuple<at::Tensor, at::Tensor> rwkv7_reference(const at::Tensor& r, const at::Tensor& w,
                                                   const at::Tensor& k, const at::Tensor& v,
                                                   const at::Tensor& a, const at::Tensor& b,
                                                   double scale,
                                                   const OptionalTensor& initial_state) {
  const auto real = real_dtype(sequence_dtype({r, w, k, v, a, b}));
  auto steps = [&](const at::Tensor& x) { return x.to(real).unbind(1); };
  const auto R = steps(r);
  const auto K = steps(k);
  const auto V = steps(v);
  const auto from = steps(a);
  const auto to = steps(b);
  const auto decay = steps(at::exp(w.to(real)).unsqueeze(-1));
  auto [out, state] = step_by_step(
      r.size(1), first_state(initial_state, {r.size(0), r.size(2), r.size(3), v.size(3)}, real, r),
      [&](int64_t t, const at::Tensor& before) {
        const at::Tensor after = decay[t] * before +
                                 outer_product(to[t], read_state(before, from[t])) +
                                 outer_product(K[t], V[t]);
        return std::pair(scale * read_state(after, R[t]), after);
      });
  return {out.to(r.scalar_type()), state};
}

}  // namespace assay::ops
