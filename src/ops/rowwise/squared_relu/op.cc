// Squared ReLU: the operator and its reference implementation.
#include "ops/core/elementwise_op.h"
#include "ops/rowwise/squared_relu/squared_relu.h"

namespace assay::ops {

at::Tensor squared_relu_reference(const at::Tensor& x) { return at::relu(x).square(); }
at::Tensor squared_relu(const at::Tensor& x) {
  return elementwise<SquaredRelu>("squared_relu", x, squared_relu_reference);
}

const bool registered_squared_relu = register_kernels("squared_relu");

}  // namespace assay::ops
