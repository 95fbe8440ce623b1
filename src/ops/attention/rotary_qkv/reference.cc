#include <torch/torch.h>

#include "ops/attention/rotary_qkv/kernel.h"
#include "ops/attention/rotary_qkv/rotary_qkv.h"

namespace assay::ops {

std::array<at::Tensor, 2> rotary_qk_reference(const at::Tensor& qk, int64_t kv_heads,
                                              const at::Tensor& cos, const at::Tensor& sin,
                                              const std::optional<at::Tensor>& scale) {
  // [T, 1, D/2]
  const at::Tensor c = cos.unsqueeze(1);
  const at::Tensor s = sin.unsqueeze(1);
  const auto halves = qk.chunk(2, -1);
  const at::Tensor turned =
      at::cat({halves[0] * c - halves[1] * s, halves[1] * c + halves[0] * s}, -1);
  const auto unit = [](const at::Tensor& x) {
    return x * at::rsqrt(x.square().sum(-1, true) + kUnitLengthEps);
  };
  const auto parts = turned.split_with_sizes({qk.size(2) - kv_heads, kv_heads}, 2);
  at::Tensor q = parts[0];
  at::Tensor k = parts[1];
  if (scale) {
    q = unit(q) * scale->unsqueeze(-1);
    k = unit(k);
  }
  return {q.to(qk.scalar_type()), k.to(qk.scalar_type())};
}

}  // namespace assay::ops
