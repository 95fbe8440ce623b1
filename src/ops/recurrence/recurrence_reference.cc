#include "ops/recurrence/recurrence_reference.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>

namespace assay::ops {

HeadShape check_heads(const char* op, const char* query, const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& v, double scale) {
  check_dims(op, query, q, 4, "[B, T, H, K]");
  check_dims(op, "k", k, 4, "[B, T, H, K]");
  check_dims(op, "v", v, 4, "[B, T, H, V]");
  const HeadShape shape{q.size(0), q.size(1), std::max({q.size(2), k.size(2), v.size(2)}),
                        q.size(3), v.size(3), query};
  check_shape(op, "k", k, {shape.batch, shape.time, k.size(2), shape.key_dim},
              "[B, T, heads of k, K]");
  check_shape(op, "v", v, {shape.batch, shape.time, v.size(2), shape.value_dim},
              "[B, T, heads of v, V]");
  for (const auto& [name, tensor] : {std::pair(query, &q), {"k", &k}, {"v", &v}}) {
    TORCH_CHECK_VALUE(shape.heads % tensor->size(2) == 0, op, ": ", name, " has ", tensor->size(2),
                      " heads (its size 2), which do not divide ", shape.heads);
    check_like(op, name, *tensor, query, q);
  }
  TORCH_CHECK_VALUE(std::isfinite(scale), op, ": scale is ", scale, ", expected a finite number");
  return shape;
}

void check_gate(const char* op, const char* argument, const at::Tensor& gate,
                const HeadShape& shape, const at::Tensor& like, int64_t last) {
  if (last == 0)
    check_shape(op, argument, gate, {shape.batch, shape.time, shape.heads}, "[B, T, H]");
  else
    check_shape(op, argument, gate, {shape.batch, shape.time, shape.heads, last}, "[B, T, H, K]");
  check_like(op, argument, gate, shape.query, like);
}

void check_state(const char* op, const OptionalTensor& initial_state, const HeadShape& shape,
                 const at::Tensor& like) {
  if (!initial_state) return;
  check_shape(op, "initial_state", *initial_state,
              {shape.batch, shape.heads, shape.key_dim, shape.value_dim}, "[B, H, K, V]");
  check_like(op, "initial_state", *initial_state, shape.query, like);
}

at::Tensor with_heads(const at::Tensor& x, int64_t heads) {
  return x.size(2) == heads ? x : x.repeat_interleave(heads / x.size(2), 2);
}

at::Tensor first_state(const OptionalTensor& initial_state, at::IntArrayRef shape,
                       at::ScalarType real, const at::Tensor& like) {
  return initial_state ? initial_state->to(real) : at::zeros(shape, like.options().dtype(real));
}

std::tuple<at::Tensor, at::Tensor> step_by_step(int64_t time, at::Tensor state, const Step& step) {
  std::vector<at::Tensor> outputs(time);
  for (int64_t t = 0; t < time; ++t) std::tie(outputs[t], state) = step(t, state);
  return {at::stack(outputs, 1), state};
}

at::Tensor read_state(const at::Tensor& state, const at::Tensor& q) {
  return at::matmul(q.unsqueeze(-2), state).squeeze(-2);
}
at::Tensor outer_product(const at::Tensor& k, const at::Tensor& v) {
  return k.unsqueeze(-1) * v.unsqueeze(-2);
}

}  // namespace assay::ops
