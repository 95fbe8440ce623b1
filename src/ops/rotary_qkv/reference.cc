#include <torch/torch.h>

#include "ops/rotary_qkv/kernel.h"
#include "ops/rotary_qkv/rotary_qkv.h"

namespace assay::ops {

std::array<at::Tensor, 3> rotary_qkv_reference(const at::Tensor& qkv, int64_t kv_heads,
                                               const at::Tensor& cos, const at::Tensor& sin,
                                               const std::optional<at::Tensor>& scale,
                                               bool with_values) {
  const at::Tensor c = cos.unsqueeze(1), s = sin.unsqueeze(1);  // [T, 1, D/2]
  const auto turned = [&](const at::Tensor& x) {
    const auto halves = x.chunk(2, -1);
    return at::cat({halves[0] * c - halves[1] * s, halves[1] * c + halves[0] * s}, -1);
  };
  const auto unit = [](const at::Tensor& x) {
    return x * at::rsqrt(x.square().sum(-1, true) + kUnitLengthEps);
  };
  const int64_t values = with_values ? kv_heads : 0, heads = qkv.size(2) - kv_heads - values;
  const auto parts = qkv.split_with_sizes({heads, kv_heads, values}, 2);
  at::Tensor q = turned(parts[0]), k = turned(parts[1]);
  if (scale) {
    q = unit(q) * scale->unsqueeze(-1);
    k = unit(k);
  }
  return {q.to(qkv.scalar_type()), k.to(qkv.scalar_type()), with_values ? parts[2] : at::Tensor()};
}

}  // namespace assay::ops
