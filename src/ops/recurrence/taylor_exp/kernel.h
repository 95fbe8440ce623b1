#pragma once
// The features of taylor_exp.h on raw memory, row by row, and their gradient:
//   y = weights ⊙ (1, x_i, x_i x_j for i ≤ j)
//   dx_i = g_i + Σ_{j ≥ i} g_ij x_j + Σ_{j ≤ i} g_ji x_j,  g = weights ⊙ dy
#include "ops/core/kernel.h"

namespace assay::ops {

// F
constexpr int64_t feature_count(int64_t key_dim) {
  return 1 + key_dim + key_dim * (key_dim + 1) / 2;
}

struct TaylorFeatures {
  DType dtype;            // of all; f32 or f64, on CUDA also bf16 with weights in f32
  int64_t rows, key_dim;  // K
  const void* x;          // in  [rows, K]
  const void* weights;    // in  [F], or null: 1
};

namespace cpu {
// out [rows, F]
void taylor_features(const TaylorFeatures&, void* y, const ParallelFor&);
// out [rows, K]
void taylor_features(const TaylorFeatures&, const void* dy, void* dx, const ParallelFor&);
}  // namespace cpu
namespace cuda {
void taylor_features(const TaylorFeatures&, void* y, Stream);
void taylor_features(const TaylorFeatures&, const void* dy, void* dx, Stream);
}  // namespace cuda

// A few steps of taylor_exp.h, as decoding takes them, in fp32: the state is read once and written
// once, no features are written. CUDA, sm_90a: enqueues on `stream`, allocates nothing, gives the
// same bits every time.
constexpr int64_t kFewTaylorSteps = 8, kMaxTaylorKey = 32, kMaxTaylorValue = 511,
                  kMaxTaylorState = 51200;
struct TaylorSteps {
  // time ≥ 1; sizes to the limits above, and F (V + 1)
  int64_t batch, time, heads, key_dim, value_dim;
  float scale, eps;
  bool normalize;
  HeadView q, k, v;                 // in  [B, T, ·, K], [B, T, ·, K], [B, T, ·, V]
  DType q_dtype, k_dtype, v_dtype;  //     f32 or bf16
  // in  [B, H, F, V + 1], 16-byte aligned as the final one is; or null
  const float* initial_state;
  void* out;           // out [B, T, H, V] in q_dtype
  float* final_state;  // out [B, H, F, V + 1]
};
namespace cuda {
void decode(const TaylorSteps&, Stream);
}  // namespace cuda

}  // namespace assay::ops
