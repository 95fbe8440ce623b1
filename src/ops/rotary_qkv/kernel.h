#pragma once
// Queries, keys and values out of one projection, queries and keys rotated by their position
// [RoFormer, eq. 34].
//   (x₁, x₂) ← (x₁ cos θ − x₂ sin θ, x₂ cos θ + x₁ sin θ)     x₁, x₂: the halves of a head, θ[t, i]
// With QK-norm they are of unit length too, and q is multiplied by its head's scale: x / sqrt(Σ x²
// + 1e-6) [Henry 2020, eq. 6]. Values are optional.
#include "ops/kernel.h"

namespace assay::ops {

struct RotaryQkv {
  DType dtype;                           // of qkv, q, k, v. "real": f64 when dtype is f64, else f32
  int64_t batch, time, heads, kv_heads;  // q has `heads`, k and v have `kv_heads`
  int64_t head_dim;                      // even
  // true: q, k, v are gradients (in), qkv is theirs (out), turned back
  bool backward;
  // in  [B T, heads + 2 kv_heads, D], or heads + kv_heads without v; rows `qkv_stride` elements
  // apart, and contiguous in the backward pass as everything else here
  void* qkv;
  int64_t qkv_stride;
  void *q, *k, *v;        // out [B, T, heads, D], [B, T, kv_heads, D] twice; v may be null
  const void *cos, *sin;  // in  [T, D/2] real
  // in  [heads] real; null: no QK-norm, and the two below unused
  const void* scale;
  const void* normed;  // in  qkv of the forward, contiguous; backward
  // out [B, T, heads] real: what each position adds to the gradient; backward
  void* dscale;
  ASSAY_HOST_DEVICE int64_t packed_heads() const { return heads + (v ? 2 : 1) * kv_heads; }
};

constexpr double kUnitLengthEps = 1e-6;

namespace cpu {
void rotary_qkv(const RotaryQkv&, const ParallelFor&);
}
namespace cuda {
void rotary_qkv(const RotaryQkv&, Stream);
}

}  // namespace assay::ops
