// RWKV-7's element-wise parts: checks, and the operators around the kernels.
#include "ops/core/rowwise_op.h"
#include "ops/rowwise/rwkv7_elements/kernel.h"
#include "ops/rowwise/rwkv7_elements/rwkv7_elements.h"

namespace assay::ops {
namespace {

void check_all(const char* op, int64_t heads, const std::vector<NamedTensor>& sequences,
               const std::vector<NamedTensor>& parameters) {
  check_sequences(op, heads, sequences);
  const auto& [name, x] = sequences[0];
  for (const NamedTensor& other : parameters) {
    check_shape(op, other.name, other.tensor, {x.size(-1)}, "[D]");
    check_like(op, other.name, other.tensor, name, x);
  }
}

}  // namespace

Rwkv7Prepared rwkv7_prepare(const at::Tensor& d, const at::Tensor& e, const at::Tensor& k,
                            const at::Tensor& k_k, const at::Tensor& k_a, int64_t heads) {
  check_all("rwkv7_prepare", heads, {{"k", k}, {"d", d}, {"e", e}}, {{"k_k", k_k}, {"k_a", k_a}});
  if (!has_rowwise_kernel(k, heads)) return rwkv7_prepare_reference(d, e, k, k_k, k_a, heads);
  const auto out = rowwise<Rwkv7Prepare>({d, e, k}, {k_k, k_a}, kRwkv7Eps, heads);
  return {out[0], out[1], out[2], out[3]};
}

at::Tensor rwkv7_values(const at::Tensor& v, const at::Tensor& v_first, const at::Tensor& m) {
  check_all("rwkv7_values", 1, {{"v", v}, {"v_first", v_first}, {"m", m}}, {});
  if (!has_rowwise_kernel(v, 1)) return rwkv7_values_reference(v, v_first, m);
  return rowwise<Rwkv7Values>({v, v_first, m}, {}, 0, 1)[0];
}

at::Tensor rwkv7_output(const at::Tensor& n, const at::Tensor& r, const at::Tensor& k,
                        const at::Tensor& v, const at::Tensor& g, const at::Tensor& r_k,
                        int64_t heads) {
  check_all("rwkv7_output", heads, {{"n", n}, {"r", r}, {"k", k}, {"v", v}, {"g", g}},
            {{"r_k", r_k}});
  if (!has_rowwise_kernel(n, heads)) return rwkv7_output_reference(n, r, k, v, g, r_k, heads);
  return rowwise<Rwkv7Output>({n, r, k, v, g}, {r_k}, 0, heads)[0];
}

const bool registered_rwkv7 = register_kernels("rwkv7_prepare") &&
                              register_kernels("rwkv7_values") && register_kernels("rwkv7_output");

}  // namespace assay::ops
