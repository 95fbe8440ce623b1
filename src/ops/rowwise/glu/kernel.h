#pragma once
// Gated linear unit after its projection, [GLU Variants, Shazeer 2020, eq. 6]: the two halves
// of a row,
//   y = act(g) ⊙ u,   [g, u] = h          act(x) = x σ(c (x + a x³))
//   SiLU: c = 1, a = 0          GELU (tanh form): c = 2 √(2/π), a = 0.044715
#include "ops/core/kernel.h"

namespace assay::ops {

struct Glu {
  DType dtype;  // dtype of all tensors; computed in f64 when it is f64, else in f32
  // any
  int64_t rows;
  int64_t width;
  double c;
  double a;
  const void* h;  // in  [rows, 2 width]
  void* y;        // out [rows, width]; backward: not touched
};
struct GluBackward {
  Glu forward;     // h as it was
  const void* dy;  // in  [rows, width]
  void* dh;        // out [rows, 2 width]
};

namespace cpu {
void glu(const Glu&, const ParallelFor&);
void glu(const GluBackward&, const ParallelFor&);
}  // namespace cpu
namespace cuda {
void glu(const Glu&, Stream);
void glu(const GluBackward&, Stream);
}  // namespace cuda

}  // namespace assay::ops
