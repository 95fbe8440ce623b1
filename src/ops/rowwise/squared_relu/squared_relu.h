#pragma once
// Squared ReLU, y = max(x, 0)², differentiable [So et al. 2021, Primer, §3.1].
// One pass over x; the gradient dx = 2 max(x, 0) dy is one pass over x and dy. NaN stays NaN.
#include "ops/core/elementwise.h"

namespace at {
class Tensor;
}

namespace assay::ops {

struct SquaredRelu {
  template <class R>
  ASSAY_HOST_DEVICE static R forward(R x) {
    return x <= 0 ? R(0) : x * x;
  }
  template <class R>
  ASSAY_HOST_DEVICE static R backward(R x, R dy) {
    return x <= 0 ? R(0) : dy * (2 * x);
  }
};

// x of any shape (fp32, fp64, bf16, fp16) → the same shape and dtype. Throws
// ValueError for integers.
at::Tensor squared_relu(const at::Tensor& x);
// from tensor arithmetic: defines the result
at::Tensor squared_relu_reference(const at::Tensor& x);

}  // namespace assay::ops
