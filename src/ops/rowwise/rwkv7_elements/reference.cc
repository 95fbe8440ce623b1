#include <torch/torch.h>

#include <cmath>

#include "ops/rowwise/rwkv7_elements/kernel.h"
#include "ops/rowwise/rwkv7_elements/rwkv7_elements.h"

namespace assay::ops {
namespace {

at::Tensor wide(const at::Tensor& x) {
  return x.to(at::promote_types(x.scalar_type(), at::kFloat));
}

}  // namespace

Rwkv7Prepared rwkv7_prepare_reference(const at::Tensor& d, const at::Tensor& e, const at::Tensor& k,
                                      const at::Tensor& k_k, const at::Tensor& k_a, int64_t heads) {
  const at::Tensor a = wide(e).sigmoid();
  const at::Tensor q = (wide(k) * k_k).unflatten(-1, {heads, -1});
  const at::Tensor removed = (q / q.norm(2, -1, true).clamp_min(kRwkv7Eps)).flatten(-2);
  const auto narrow = [&](const at::Tensor& x) { return x.to(k.scalar_type()); };
  return {Rwkv7Prepare::kDecay * wide(d).sigmoid(), narrow(wide(k) * (1 + (a - 1) * k_a)),
          narrow(-removed), narrow(removed * a)};
}

at::Tensor rwkv7_values_reference(const at::Tensor& v, const at::Tensor& v_first,
                                  const at::Tensor& m) {
  return at::lerp(wide(v), wide(v_first), wide(m).sigmoid()).to(v.scalar_type());
}

at::Tensor rwkv7_output_reference(const at::Tensor& n, const at::Tensor& r, const at::Tensor& k,
                                  const at::Tensor& v, const at::Tensor& g, const at::Tensor& r_k,
                                  int64_t heads) {
  const auto parts = [&](const at::Tensor& x) { return wide(x).unflatten(-1, {heads, -1}); };
  const at::Tensor bonus = (parts(r) * parts(k) * parts(r_k)).sum(-1, true) * parts(v);
  return ((wide(n) + bonus.flatten(-2)) * wide(g)).to(n.scalar_type());
}

}  // namespace assay::ops
