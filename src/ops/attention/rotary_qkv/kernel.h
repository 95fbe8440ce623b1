#pragma once
// Queries and keys out of one projection, rotated by their position [RoFormer, eq. 34].
//   (x₁, x₂) ← (x₁ cos θ − x₂ sin θ, x₂ cos θ + x₁ sin θ)     x₁, x₂: the halves of a head, θ[t, i]
// With QK-norm they are of unit length too, and q is multiplied by its head's scale: x / sqrt(Σ x²
// + 1e-6) [Henry 2020, eq. 6].
#include "ops/core/kernel.h"

namespace assay::ops {

struct RotaryQk {
  DType dtype;  // dtype of qk, q, k. "real": f64 when dtype is f64, else f32
  // q has `heads`, k has `kv_heads`
  int64_t batch;
  int64_t time;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;  // even
  // true: q and k are gradients (in), qk is theirs (out), turned back
  bool backward;
  View qk;  // in  [B, T, heads + kv_heads, D]
  // out [B, T, heads, D], [B, T, kv_heads, D]; these may be the parts of qk
  View q;
  View k;
  // in  [T, D/2] real
  const void* cos;
  const void* sin;
  // in  [heads] real; null: no QK-norm, and the two below unused
  const void* scale;
  View normed;  // in  qk of the forward; backward
  // out [B, T, heads] real: what each position adds to the gradient; backward
  void* dscale;
};

constexpr double kUnitLengthEps = 1e-6;

namespace cpu {
void rotary_qk(const RotaryQk&, const ParallelFor&);
}
namespace cuda {
void rotary_qk(const RotaryQk&, Stream);
}

}  // namespace assay::ops
