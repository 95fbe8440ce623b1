#pragma once
// Norms of rows, or of `groups` equal parts of rows each: root-mean-square [Zhang & Sennrich 2019,
// eq. 4] and, with a bias, layer norm [Ba et al. 2016, eq. 4].
//   m = 0, or mean_j x_j    s = 1 / sqrt(mean_j (x_j − m)² + eps)   x̂ = s (x − m)   y = x̂ ⊙ w + b
//   dx = s (g − [mean_j g_j] − x̂ mean_j(g_j x̂_j)), g = w ⊙ dy, [ ] of layer norm
//   dw = Σ x̂ ⊙ dy           db = Σ dy
#include "ops/kernel.h"

namespace assay::ops {

struct Norm {
  DType dtype;                  // of x, y. "real": f64 when dtype is f64, else f32
  int64_t rows, groups, width;  // any; a row has groups · width numbers
  double eps;
  const void* x;       // in  [rows, groups, width]
  const void* weight;  // in  [groups, width] real
  const void* bias;    // in  [groups, width] real; null: root-mean-square
  void* y;             // out [rows, groups, width]; backward: not touched
  void *scale, *mean;  // s, m: out [rows, groups] real; backward: in; mean is null without bias
  // CUDA only, null if not wanted: the norm of sum = x + added, rounded. Backward: x is the sum.
  const void* added = nullptr;  // in  [rows, groups, width]
  void* sum = nullptr;          // out [rows, groups, width]
};
struct NormBackward {
  Norm forward;
  const void* dy;  // in  [rows, groups, width]
  void* dx;        // out [rows, groups, width]
  // out [1 or 2, groups, width] real, dweight and dbias; their sums' order depends on `rows` alone
  void* dparameters;
  const void* dsum = nullptr;  // in  [rows, groups, width], CUDA only: added to dx, both rounded
};

namespace cpu {
size_t workspace_bytes(const NormBackward&);
void norm(const Norm&, const ParallelFor&);
void norm(const NormBackward&, void* workspace, const ParallelFor&);
}  // namespace cpu
namespace cuda {
size_t workspace_bytes(const NormBackward&);
void norm(const Norm&, Stream);
void norm(const NormBackward&, void* workspace, Stream);
}  // namespace cuda

}  // namespace assay::ops
