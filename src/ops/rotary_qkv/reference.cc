#include <torch/torch.h>

#include "ops/rotary_qkv/rotary_qkv.h"

namespace assay::ops {

std::array<at::Tensor, 3> rotary_qkv_reference(const at::Tensor& qkv, int64_t kv_heads, const at::Tensor& cos, const at::Tensor& sin) {
  const at::Tensor c = cos.unsqueeze(1), s = sin.unsqueeze(1);  // [T, 1, D/2]
  const auto turned = [&](const at::Tensor& x) {
    const auto halves = x.chunk(2, -1);
    return at::cat({halves[0] * c - halves[1] * s, halves[1] * c + halves[0] * s}, -1).to(x.scalar_type());
  };
  const auto parts = qkv.split_with_sizes({qkv.size(2) - 2 * kv_heads, kv_heads, kv_heads}, 2);
  return {turned(parts[0]), turned(parts[1]), parts[2]};
}

}  // namespace assay::ops
