#pragma once
// Rows of unit length, y = x / sqrt(Σ x² + eps), differentiable. With s = 1 / sqrt(Σ x² + eps):
//   dx = s (dy − s² x Σ(dy x))
#include "ops/core/rowwise.h"

namespace at {
class Tensor;
}

namespace assay::ops {

struct UnitLength : RowwiseFormula {
  static constexpr int kInputs = 1;
  static constexpr int kOutputs = 1;
  static constexpr int kSums = 1;
  static constexpr int kBackwardSums = 1;

  template <class R>
  ASSAY_FORMULA void terms(const R* x, const R*, R* t) {
    t[0] = x[0] * x[0];
  }
  template <class R>
  ASSAY_FORMULA void finish(R* sum, R, R eps) {
    sum[0] = formula::rsqrt(sum[0] + eps);
  }
  template <class R>
  ASSAY_FORMULA void forward(const R* x, const R*, const R* sum, R* y) {
    y[0] = x[0] * sum[0];
  }
  template <class R>
  ASSAY_FORMULA void backward_terms(const R* x, const R*, const R* dy, R* t) {
    t[0] = dy[0] * x[0];
  }
  template <class R>
  ASSAY_FORMULA void finish_backward(R* sum, R, R) {
    sum[1] *= sum[0] * sum[0] * sum[0];
  }
  template <class R>
  ASSAY_FORMULA void backward(const R* x, const R*, const R* sum, const R* dy, R* dx, R*) {
    dx[0] = sum[0] * dy[0] - x[0] * sum[1];
  }
};

// x [..., D] (fp32, fp64, bf16), each of `groups` equal parts of a row by itself → the same shape
// and dtype. Throws ValueError for integers.
at::Tensor unit_length(const at::Tensor& x, double eps, int64_t groups = 1);
// Reference implementation in plain tensor arithmetic.
at::Tensor unit_length_reference(const at::Tensor& x, double eps, int64_t groups = 1);

}  // namespace assay::ops
