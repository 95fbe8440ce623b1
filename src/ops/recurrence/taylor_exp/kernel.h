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
  DType dtype;  // dtype of all tensors: f32 or f64, on CUDA also bf16 with weights in f32
  // K
  int64_t rows;
  int64_t key_dim;
  const void* x;        // in  [rows, K]
  const void* weights;  // in  [F], or null: 1
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
constexpr int64_t kFewTaylorSteps = 8;
constexpr int64_t kMaxTaylorKey = 32;
constexpr int64_t kMaxTaylorValue = 511;
constexpr int64_t kMaxTaylorState = 51200;
struct TaylorSteps {
  // time ≥ 1; sizes to the limits above, and F (V + 1)
  int64_t batch;
  int64_t time;
  int64_t heads;
  int64_t key_dim;
  int64_t value_dim;
  float scale;
  float eps;
  bool normalize;
  // in  [B, T, ·, K], [B, T, ·, K], [B, T, ·, V]
  HeadView q;
  HeadView k;
  HeadView v;
  //     f32 or bf16
  DType q_dtype;
  DType k_dtype;
  DType v_dtype;
  // in  [B, H, F, V + 1], 16-byte aligned as the final one is; or null
  const float* initial_state;
  void* out;           // out [B, T, H, V] in q_dtype
  float* final_state;  // out [B, H, F, V + 1]
};
namespace cuda {
void decode(const TaylorSteps&, Stream);
}  // namespace cuda

}  // namespace assay::ops
