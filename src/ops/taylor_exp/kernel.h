#pragma once
// The features of taylor_exp.h on raw memory, row by row, and their gradient:
//   y = weights ⊙ (1, x_i, x_i x_j for i ≤ j)          dx_i = g_i + Σ_{j ≥ i} g_ij x_j + Σ_{j ≤ i} g_ji x_j,  g =
//   weights ⊙ dy
#include "ops/kernel.h"

namespace assay::ops {

struct TaylorFeatures {
  DType dtype;            // of all; f32 or f64
  int64_t rows, key_dim;  // K; F = 1 + K + K(K+1)/2
  const void* x;          // in  [rows, K]
  const void* weights;    // in  [F], or null: 1
};

namespace cpu {
void taylor_features(const TaylorFeatures&, void* y, const ParallelFor&);                   // out [rows, F]
void taylor_features(const TaylorFeatures&, const void* dy, void* dx, const ParallelFor&);  // out [rows, K]
}  // namespace cpu

}  // namespace assay::ops
