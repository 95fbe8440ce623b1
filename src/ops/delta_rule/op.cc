// assay::delta_rule, gated_delta_rule, rwkv7: checks and registration.
#include <torch/torch.h>

#include "ops/delta_rule/delta_rule.h"
#include "ops/matrix_state/steps.h"
#include "ops/paths.h"

namespace assay::ops {

std::tuple<at::Tensor, at::Tensor> delta_rule(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                              const at::Tensor& beta, double scale,
                                              const OptionalTensor& initial_state) {
  const HeadShape shape = check_heads("delta_rule", "q", q, k, v);
  check_gate("delta_rule", "beta", beta, shape, q);
  check_state("delta_rule", initial_state, shape, q);
  return gated_delta_rule_reference(q, k, v, at::zeros_like(beta), beta, scale, initial_state);
}

std::tuple<at::Tensor, at::Tensor> gated_delta_rule(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                    const at::Tensor& g, const at::Tensor& beta, double scale,
                                                    const OptionalTensor& initial_state) {
  const HeadShape shape = check_heads("gated_delta_rule", "q", q, k, v);
  check_gate("gated_delta_rule", "g", g, shape, q);
  check_gate("gated_delta_rule", "beta", beta, shape, q);
  check_state("gated_delta_rule", initial_state, shape, q);
  return gated_delta_rule_reference(q, k, v, g, beta, scale, initial_state);
}

std::tuple<at::Tensor, at::Tensor> rwkv7(const at::Tensor& r, const at::Tensor& w, const at::Tensor& k,
                                         const at::Tensor& v, const at::Tensor& a, const at::Tensor& b, double scale,
                                         const OptionalTensor& initial_state) {
  const HeadShape shape = check_heads("rwkv7", "r", r, k, v);
  for (const auto& [name, tensor] : {std::pair("r", &r), {"w", &w}, {"k", &k}, {"a", &a}, {"b", &b}})
    check_gate("rwkv7", name, *tensor, shape, r, shape.key_dim);
  check_shape("rwkv7", "v", v, {shape.batch, shape.time, shape.heads, shape.value_dim}, "[B, T, H, V]");
  check_state("rwkv7", initial_state, shape, r);
  return rwkv7_reference(r, w, k, v, a, b, scale, initial_state);
}

const bool registered_paths =
    register_composed("delta_rule") && register_composed("gated_delta_rule") && register_composed("rwkv7");
TORCH_LIBRARY_FRAGMENT(assay, m) {
  m.def(
      "delta_rule(Tensor q, Tensor k, Tensor v, Tensor beta, float scale, Tensor? initial_state=None) -> (Tensor out, "
      "Tensor final_state)",
      delta_rule);
  m.def(
      "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor? initial_state=None) "
      "-> (Tensor out, Tensor final_state)",
      gated_delta_rule);
  m.def(
      "rwkv7(Tensor r, Tensor w, Tensor k, Tensor v, Tensor a, Tensor b, float scale, Tensor? initial_state=None) -> "
      "(Tensor out, Tensor final_state)",
      rwkv7);
}

}  // namespace assay::ops
