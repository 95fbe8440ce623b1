// assay::delta_rule, gated_delta_rule, rwkv7: checks and registration.
#include <torch/torch.h>

#include "ops/core/paths.h"
#include "ops/core/register.h"
#include "ops/recurrence/delta_rule/delta_rule.h"
#include "ops/recurrence/matrix_recurrence/matrix_recurrence.h"

namespace assay::ops {
namespace {

// g [B, T, H] or undefined for none.
std::tuple<at::Tensor, at::Tensor> gated(const HeadShape& shape, const at::Tensor& q,
                                         const at::Tensor& k, const at::Tensor& v,
                                         const at::Tensor& g, const at::Tensor& beta, double scale,
                                         const OptionalTensor& initial_state) {
  const auto real = real_dtype(sequence_dtype({q, k, v, g, beta}));
  const Prepare prepare = [=](const std::vector<at::Tensor>& s) {
    MatrixRecurrence steps{
        .scale = scale, .q = s[0], .k = s[1], .v = s[2], .beta = s[4].unsqueeze(-1)};
    if (s[3].defined()) steps.log_decay = s[3].unsqueeze(-1);
    return steps;
  };
  const at::Tensor state = first_state(
      initial_state, {shape.batch, shape.heads, shape.key_dim, shape.value_dim}, real, q);
  const auto [out, last] = recurrence(prepare, {q, k, v, g, beta}, state, shape.time);
  return {out.to(q.scalar_type()), last};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> delta_rule(const at::Tensor& q, const at::Tensor& k,
                                              const at::Tensor& v, const at::Tensor& beta,
                                              double scale, const OptionalTensor& initial_state) {
  const HeadShape shape = check_heads("delta_rule", "q", q, k, v, scale);
  check_gate("delta_rule", "beta", beta, shape, q);
  check_state("delta_rule", initial_state, shape, q);
  return gated(shape, q, k, v, {}, beta, scale, initial_state);
}

std::tuple<at::Tensor, at::Tensor> gated_delta_rule(const at::Tensor& q, const at::Tensor& k,
                                                    const at::Tensor& v, const at::Tensor& g,
                                                    const at::Tensor& beta, double scale,
                                                    const OptionalTensor& initial_state) {
  const HeadShape shape = check_heads("gated_delta_rule", "q", q, k, v, scale);
  check_gate("gated_delta_rule", "g", g, shape, q);
  check_gate("gated_delta_rule", "beta", beta, shape, q);
  check_state("gated_delta_rule", initial_state, shape, q);
  return gated(shape, q, k, v, g, beta, scale, initial_state);
}

std::tuple<at::Tensor, at::Tensor> rwkv7(const at::Tensor& r, const at::Tensor& w,
                                         const at::Tensor& k, const at::Tensor& v,
                                         const at::Tensor& a, const at::Tensor& b, double scale,
                                         const OptionalTensor& initial_state) {
  const HeadShape shape = check_heads("rwkv7", "r", r, k, v, scale);
  for (const auto& [name, tensor] :
       {std::pair("r", &r), {"w", &w}, {"k", &k}, {"a", &a}, {"b", &b}})
    check_gate("rwkv7", name, *tensor, shape, r, shape.key_dim);
  check_shape("rwkv7", "v", v, {shape.batch, shape.time, shape.heads, shape.value_dim},
              "[B, T, H, V]");
  check_state("rwkv7", initial_state, shape, r);
  const auto real = real_dtype(sequence_dtype({r, w, k, v, a, b}));
  const Prepare prepare = [=](const std::vector<at::Tensor>& s) {
    return MatrixRecurrence{.transition = Transition::rank_one,
                            .scale = scale,
                            .q = s[0],
                            .k = s[2],
                            .v = s[3],
                            .log_decay = s[1],
                            .a = s[4],
                            .b = s[5]};
  };
  const at::Tensor state = first_state(
      initial_state, {shape.batch, shape.heads, shape.key_dim, shape.value_dim}, real, r);
  const auto [out, last] = recurrence(prepare, {r, w, k, v, a, b}, state, shape.time);
  return {out.to(r.scalar_type()), last};
}

constexpr const char* kKeySizes = "of 64, 96, 128 and 256";
const bool registered_paths = register_matrix_recurrence("delta_rule", 2, 1, kKeySizes) &&
                              register_matrix_recurrence("gated_delta_rule", 2, 1, kKeySizes) &&
                              register_matrix_recurrence("rwkv7", 2, 1, "of 64 and 128");
TORCH_LIBRARY_FRAGMENT(assay, m) {
  register_operator(m,
                    "delta_rule(Tensor q, Tensor k, Tensor v, Tensor beta, float scale, "
                    "Tensor? initial_state=None) -> (Tensor out, Tensor final_state)",
                    "S_t = S_{t−1} + k_t β_t (v_t − S_{t−1}ᵀ k_t)ᵀ, out_t = scale · S_tᵀ q_t",
                    delta_rule);
  register_operator(
      m,
      "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, "
      "Tensor? initial_state=None) -> (Tensor out, Tensor final_state)",
      "S' = exp(g_t) S_{t−1}, S_t = S' + k_t β_t (v_t − S'ᵀ k_t)ᵀ, "
      "out_t = scale · S_tᵀ q_t",
      gated_delta_rule);
  register_operator(
      m,
      "rwkv7(Tensor r, Tensor w, Tensor k, Tensor v, Tensor a, Tensor b, float scale, "
      "Tensor? initial_state=None) -> (Tensor out, Tensor final_state)",
      "S_t = diag(exp w_t) S_{t−1} + b_t (S_{t−1}ᵀ a_t)ᵀ + k_t v_tᵀ, "
      "out_t = scale · S_tᵀ r_t",
      rwkv7);
}

}  // namespace assay::ops
