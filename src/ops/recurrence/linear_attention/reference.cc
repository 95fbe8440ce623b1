#include <torch/torch.h>

#include "ops/recurrence/linear_attention/linear_attention.h"
#include "ops/recurrence/recurrence_reference.h"

namespace assay::ops {

OutputAndState gla_reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const at::Tensor& gk, double scale,
                             const OptionalTensor& initial_state) {
  const auto real = real_dtype(sequence_dtype({q, k, v, gk}));
  const int64_t heads = gk.size(2);
  const auto Q = with_heads(q.to(real), heads).unbind(1);
  const auto K = with_heads(k.to(real), heads).unbind(1);
  const auto V = with_heads(v.to(real), heads).unbind(1);
  const auto decay = at::exp(gk.to(real)).unsqueeze(-1).unbind(1);
  auto [out, state] = step_by_step(
      q.size(1), first_state(initial_state, {q.size(0), heads, q.size(3), v.size(3)}, real, q),
      [&](int64_t t, const at::Tensor& before) {
        const at::Tensor after = decay[t] * before + outer_product(K[t], V[t]);
        return std::pair(scale * read_state(after, Q[t]), after);
      });
  return {out.to(q.scalar_type()), state};
}

OutputAndState rwkv6_reference(const at::Tensor& r, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& w, const at::Tensor& u, double scale,
                               const OptionalTensor& initial_state) {
  const auto real = real_dtype(sequence_dtype({r, k, v, w}));
  const int64_t heads = u.size(0);
  const auto R = with_heads(r.to(real), heads).unbind(1);
  const auto K = with_heads(k.to(real), heads).unbind(1);
  const auto V = with_heads(v.to(real), heads).unbind(1);
  const auto decay = at::exp(w.to(real)).unsqueeze(-1).unbind(1);
  const at::Tensor bonus = u.to(real).unsqueeze(-1);  // [H, K, 1]
  auto [out, state] = step_by_step(
      r.size(1), first_state(initial_state, {r.size(0), heads, r.size(3), v.size(3)}, real, r),
      [&](int64_t t, const at::Tensor& before) {
        const at::Tensor added = outer_product(K[t], V[t]);
        return std::pair(scale * read_state(before + bonus * added, R[t]),
                         decay[t] * before + added);
      });
  return {out.to(r.scalar_type()), state};
}

}  // namespace assay::ops
