#pragma once
// Root-mean-square norm of rows [Zhang & Sennrich 2019, eq. 4].
//   s = 1 / sqrt(mean_j x_j² + eps)       y = s x ⊙ w
//   dx = s (w ⊙ dy) − s³ x mean_j(x_j w_j dy_j)        dw = Σ_rows s x ⊙ dy
#include "ops/kernel.h"

namespace assay::ops {

struct RmsNorm {
  DType dtype;            // of x, y. "real": f64 when dtype is f64, else f32
  int64_t rows, width;    // any
  double eps;
  const void* x;          // in  [rows, width]
  const void* weight;     // in  [width] real
  void* y;                // out [rows, width]; backward: not touched
  void* scale;            // s: out [rows] real; backward: in
};
struct RmsNormBackward {
  RmsNorm forward;
  const void* dy;         // in  [rows, width]
  void* dx;               // out [rows, width]
  void* dweight;          // out [width] real, rows summed in an order that depends on their number alone
};

namespace cpu {
size_t workspace_bytes(const RmsNormBackward&);
void rms_norm(const RmsNorm&, const ParallelFor&);
void rms_norm(const RmsNormBackward&, void* workspace, const ParallelFor&);
}  // namespace cpu
namespace cuda {
size_t workspace_bytes(const RmsNormBackward&);
void rms_norm(const RmsNorm&, Stream);
void rms_norm(const RmsNormBackward&, void* workspace, Stream);
}  // namespace cuda

}  // namespace assay::ops
