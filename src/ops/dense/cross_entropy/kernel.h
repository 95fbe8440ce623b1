#pragma once
// Softmax cross-entropy of rows of logits, and its gradient in their place.
//   losses[i] = ln Σ_j exp x[i, j] − x[i, targets[i]]
//   x[i, j]   ← scale (softmax(x_i)_j − [j = targets[i]])
// Sums run in an order that depends on the number of classes alone. A target outside [0, classes)
// makes its row NaN.
#include "ops/core/kernel.h"

namespace assay::ops {

struct CrossEntropy {
  DType dtype;  // dtype of x. "real": f64 when dtype is f64, else f32
  // any
  int64_t rows;
  int64_t classes;
  void* logits;            // in and, with `gradient`, out [rows, classes], contiguous
  const int64_t* targets;  // in  [rows]
  void* losses;            // out [rows] real
  bool gradient;
  double scale;
};

namespace cpu {
void cross_entropy(const CrossEntropy&, const ParallelFor&);
}
namespace cuda {
void cross_entropy(const CrossEntropy&, Stream);
}

}  // namespace assay::ops
