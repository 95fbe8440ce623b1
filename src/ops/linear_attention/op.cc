// assay::linear_attention, simple_gla, gla, rwkv5, rwkv6: checks and registration.
#include <torch/torch.h>

#include "ops/linear_attention/linear_attention.h"
#include "ops/matrix_state/steps.h"
#include "ops/paths.h"

namespace assay::ops {
namespace {

OutputAndState rwkv(const char* op, const at::Tensor& r, const at::Tensor& k, const at::Tensor& v, const at::Tensor& w,
                    const at::Tensor& u, double scale, const OptionalTensor& initial_state) {
  const HeadShape shape = check_heads(op, "r", r, k, v);
  if (w.dim() == 2) check_shape(op, "w", w, {shape.heads, shape.key_dim}, "[H, K]"), check_like(op, "w", w, r);
  else check_gate(op, "w", w, shape, r, shape.key_dim);
  check_shape(op, "u", u, {shape.heads, shape.key_dim}, "[H, K]");
  check_like(op, "u", u, r);
  check_state(op, initial_state, shape, r);
  return rwkv6_reference(r, k, v, w.expand({shape.batch, shape.time, shape.heads, shape.key_dim}), u, scale,
                         initial_state);
}

}  // namespace

OutputAndState linear_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
                                const OptionalTensor& initial_state) {
  const HeadShape shape = check_heads("linear_attention", "q", q, k, v);
  check_state("linear_attention", initial_state, shape, q);
  return gla_reference(q, k, v, at::zeros({1, 1, 1, 1}, q.options()).expand({shape.batch, shape.time, shape.heads, 1}),
                       scale, initial_state);
}

OutputAndState simple_gla(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
                          double scale, const OptionalTensor& initial_state) {
  const HeadShape shape = check_heads("simple_gla", "q", q, k, v);
  check_gate("simple_gla", "g", g, shape, q);
  check_state("simple_gla", initial_state, shape, q);
  return gla_reference(q, k, v, g.unsqueeze(-1), scale, initial_state);
}

OutputAndState gla(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& gk, double scale,
                   const OptionalTensor& initial_state) {
  const HeadShape shape = check_heads("gla", "q", q, k, v);
  check_gate("gla", "gk", gk, shape, q, shape.key_dim);
  check_state("gla", initial_state, shape, q);
  return gla_reference(q, k, v, gk, scale, initial_state);
}

OutputAndState rwkv5(const at::Tensor& r, const at::Tensor& k, const at::Tensor& v, const at::Tensor& w,
                     const at::Tensor& u, double scale, const OptionalTensor& initial_state) {
  check_dims("rwkv5", "w", w, 2, "[H, K]");
  return rwkv("rwkv5", r, k, v, w, u, scale, initial_state);
}
OutputAndState rwkv6(const at::Tensor& r, const at::Tensor& k, const at::Tensor& v, const at::Tensor& w,
                     const at::Tensor& u, double scale, const OptionalTensor& initial_state) {
  check_dims("rwkv6", "w", w, 4, "[B, T, H, K]");
  return rwkv("rwkv6", r, k, v, w, u, scale, initial_state);
}

const bool registered_paths = register_composed("linear_attention") && register_composed("simple_gla") &&
                              register_composed("gla") && register_composed("rwkv5") && register_composed("rwkv6");
TORCH_LIBRARY_FRAGMENT(assay, m) {
  m.def(
      "linear_attention(Tensor q, Tensor k, Tensor v, float scale, Tensor? initial_state=None) -> (Tensor out, Tensor "
      "final_state)",
      linear_attention);
  m.def(
      "simple_gla(Tensor q, Tensor k, Tensor v, Tensor g, float scale, Tensor? initial_state=None) -> (Tensor out, "
      "Tensor final_state)",
      simple_gla);
  m.def(
      "gla(Tensor q, Tensor k, Tensor v, Tensor gk, float scale, Tensor? initial_state=None) -> (Tensor out, Tensor "
      "final_state)",
      gla);
  m.def(
      "rwkv5(Tensor r, Tensor k, Tensor v, Tensor w, Tensor u, float scale, Tensor? initial_state=None) -> (Tensor "
      "out, Tensor final_state)",
      rwkv5);
  m.def(
      "rwkv6(Tensor r, Tensor k, Tensor v, Tensor w, Tensor u, float scale, Tensor? initial_state=None) -> (Tensor "
      "out, Tensor final_state)",
      rwkv6);
}

}  // namespace assay::ops
