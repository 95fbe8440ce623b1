// assay::linear_attention, simple_gla, gla, rwkv5, rwkv6: checks and registration.
#include <torch/torch.h>

#include "ops/core/paths.h"
#include "ops/core/register.h"
#include "ops/recurrence/linear_attention/linear_attention.h"
#include "ops/recurrence/matrix_recurrence/matrix_recurrence.h"

namespace assay::ops {
namespace {

// g: log decays [B, T, H, K or 1], [1, 1, H, K], or undefined for none; u [1, 1, H,
// K] or undefined.
OutputAndState attend(const HeadShape& shape, const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& v, const at::Tensor& g, const at::Tensor& u, double scale,
                      const OptionalTensor& initial_state) {
  const auto real = real_dtype(sequence_dtype({q, k, v, g}));
  const Prepare prepare = [=](const std::vector<at::Tensor>& s) {
    MatrixRecurrence steps{.scale = scale, .q = s[0], .k = s[1], .v = s[2]};
    if (s[3].defined()) {  // one for all steps: its gradient is a long sum
      const at::Tensor g = s[3].size(1) == s[0].size(1) ? s[3] : s[3].to(real);
      steps.log_decay = g.expand({s[0].size(0), s[0].size(1), -1, -1});
    }
    if (s[4].defined()) steps.u = s[4].squeeze(0).squeeze(0);
    return steps;
  };
  const at::Tensor state = first_state(
      initial_state, {shape.batch, shape.heads, shape.key_dim, shape.value_dim}, real, q);
  const auto [out, last] = recurrence(prepare, {q, k, v, g, u}, state, shape.time);
  return {out.to(q.scalar_type()), last};
}

OutputAndState rwkv(const char* op, const at::Tensor& r, const at::Tensor& k, const at::Tensor& v,
                    const at::Tensor& w, const at::Tensor& u, double scale,
                    const OptionalTensor& initial_state) {
  const HeadShape shape = check_heads(op, "r", r, k, v, scale);
  if (w.dim() == 2) {
    check_shape(op, "w", w, {shape.heads, shape.key_dim}, "[H, K]");
    check_like(op, "w", w, "r", r);
  } else check_gate(op, "w", w, shape, r, shape.key_dim);
  check_shape(op, "u", u, {shape.heads, shape.key_dim}, "[H, K]");
  check_like(op, "u", u, "r", r);
  check_state(op, initial_state, shape, r);
  return attend(shape, r, k, v, w.dim() == 2 ? w.unsqueeze(0).unsqueeze(0) : w,
                u.unsqueeze(0).unsqueeze(0), scale, initial_state);
}

}  // namespace

OutputAndState linear_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                double scale, const OptionalTensor& initial_state) {
  const HeadShape shape = check_heads("linear_attention", "q", q, k, v, scale);
  check_state("linear_attention", initial_state, shape, q);
  return attend(shape, q, k, v, {}, {}, scale, initial_state);
}

OutputAndState simple_gla(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& g, double scale, const OptionalTensor& initial_state) {
  const HeadShape shape = check_heads("simple_gla", "q", q, k, v, scale);
  check_gate("simple_gla", "g", g, shape, q);
  check_state("simple_gla", initial_state, shape, q);
  return attend(shape, q, k, v, g.unsqueeze(-1), {}, scale, initial_state);
}

OutputAndState gla(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const at::Tensor& gk, double scale, const OptionalTensor& initial_state) {
  const HeadShape shape = check_heads("gla", "q", q, k, v, scale);
  check_gate("gla", "gk", gk, shape, q, shape.key_dim);
  check_state("gla", initial_state, shape, q);
  return attend(shape, q, k, v, gk, {}, scale, initial_state);
}

OutputAndState rwkv5(const at::Tensor& r, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& w, const at::Tensor& u, double scale,
                     const OptionalTensor& initial_state) {
  check_dims("rwkv5", "w", w, 2, "[H, K]");
  return rwkv("rwkv5", r, k, v, w, u, scale, initial_state);
}
OutputAndState rwkv6(const at::Tensor& r, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& w, const at::Tensor& u, double scale,
                     const OptionalTensor& initial_state) {
  check_dims("rwkv6", "w", w, 4, "[B, T, H, K]");
  return rwkv("rwkv6", r, k, v, w, u, scale, initial_state);
}

const bool registered_paths = register_matrix_recurrence("linear_attention", /*cuda_numerics=*/3) &&
                              register_matrix_recurrence("simple_gla", /*cuda_numerics=*/3) &&
                              register_matrix_recurrence("gla") &&
                              register_matrix_recurrence("rwkv5", 2, 1, "up to 64") &&
                              register_matrix_recurrence("rwkv6", 2, 1, "up to 64");
TORCH_LIBRARY_FRAGMENT(assay, m) {
  register_operator(m,
                    "linear_attention(Tensor q, Tensor k, Tensor v, float scale, "
                    "Tensor? initial_state=None) -> (Tensor out, Tensor final_state)",
                    "S_t = S_{t−1} + k_t v_tᵀ, out_t = scale · S_tᵀ q_t", linear_attention);
  register_operator(m,
                    "simple_gla(Tensor q, Tensor k, Tensor v, Tensor g, float scale, "
                    "Tensor? initial_state=None) -> (Tensor out, Tensor final_state)",
                    "S_t = exp(g_t) S_{t−1} + k_t v_tᵀ, out_t = scale · S_tᵀ q_t, "
                    "one decay per head",
                    simple_gla);
  register_operator(m,
                    "gla(Tensor q, Tensor k, Tensor v, Tensor gk, float scale, "
                    "Tensor? initial_state=None) -> (Tensor out, Tensor final_state)",
                    "S_t = diag(exp gk_t) S_{t−1} + k_t v_tᵀ, out_t = scale · S_tᵀ q_t", gla);
  register_operator(m,
                    "rwkv5(Tensor r, Tensor k, Tensor v, Tensor w, Tensor u, float scale, "
                    "Tensor? initial_state=None) -> (Tensor out, Tensor final_state)",
                    "S_t = diag(exp w) S_{t−1} + k_t v_tᵀ, "
                    "out_t = scale · (S_{t−1} + diag(u) k_t v_tᵀ)ᵀ r_t",
                    rwkv5);
  register_operator(m,
                    "rwkv6(Tensor r, Tensor k, Tensor v, Tensor w, Tensor u, float scale, "
                    "Tensor? initial_state=None) -> (Tensor out, Tensor final_state)",
                    "S_t = diag(exp w_t) S_{t−1} + k_t v_tᵀ, "
                    "out_t = scale · (S_{t−1} + diag(u) k_t v_tᵀ)ᵀ r_t",
                    rwkv6);
}

}  // namespace assay::ops
