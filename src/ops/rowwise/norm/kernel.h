#pragma once
// Norms of rows, or of `groups` equal parts of rows each: root-mean-square [Zhang & Sennrich 2019,
// eq. 4] and, with a bias, layer norm [Ba et al. 2016, eq. 4].
//   m = 0, or mean_j x_j    s = 1 / sqrt(mean_j (x_j − m)² + eps)   x̂ = s (x − m)   y = x̂ ⊙ w + b
//   dx = s (g − [mean_j g_j] − x̂ mean_j(g_j x̂_j)), g = w ⊙ dy, [ ] of layer norm
//   dw = Σ x̂ ⊙ dy           db = Σ dy
#include "ops/core/rowwise.h"

namespace assay::ops {

struct Norm {
  DType dtype;  // dtype of x, y. "real": f64 when dtype is f64, else f32
  // any; a row has groups · width numbers
  int64_t rows;
  int64_t groups;
  int64_t width;
  double eps;
  const void* x;       // in  [rows, groups, width]
  const void* weight;  // in  [groups, width] real
  const void* bias;    // in  [groups, width] real; null: root-mean-square
  void* y;             // out [rows, groups, width]; backward: not touched
  // s, m: out [rows, groups] real; backward: in; mean is null without bias
  void* scale;
  void* mean;
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
  const void* dsum = nullptr;  // in  [rows, groups, width], CUDA only: added to dx
};

// The gradients as a row-wise formula of x, w, s and m, for CUDA. kSum: x is the second output.
template <bool kCentred, bool kSum>
struct NormGradient : RowwiseFormula {
  static constexpr int kInputs = 1;
  static constexpr int kOutputs = 1 + kSum;
  static constexpr int kParameters = 1;
  static constexpr int kStatistics = 1 + kCentred;
  static constexpr int kBackwardSums = 1 + kCentred;
  static constexpr int kExtraGradients = kCentred;
  static constexpr bool kLongParts = true;

  template <class R>
  ASSAY_FORMULA R unit(const R* x, const R* w) {
    return (kCentred ? x[0] - w[2] : x[0]) * w[1];
  }
  template <class R>
  ASSAY_FORMULA void backward_terms(const R* x, const R* w, const R* dy, R* t) {
    t[0] = dy[0] * w[0] * unit(x, w);
    if (kCentred) t[1] = dy[0] * w[0];
  }
  template <class R>
  ASSAY_FORMULA void finish_backward(R* sum, R width, R) {
    sum[0] /= width;
    if (kCentred) sum[1] /= width;
  }
  template <class R>
  ASSAY_FORMULA void backward(const R* x, const R* w, const R* sum, const R* dy, R* dx, R* dw) {
    dx[0] = w[1] * (dy[0] * w[0] - (kCentred ? sum[1] : 0) - unit(x, w) * sum[0]);
    if (kSum) dx[0] += dy[1];
    dw[0] = dy[0] * unit(x, w);
    if (kCentred) dw[1] = dy[0];
  }
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
