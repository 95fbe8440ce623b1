// Squared ReLU on CUDA.
#include "ops/cuda/elementwise.cuh"
#include "ops/rowwise/squared_relu/squared_relu.h"

namespace assay::ops::cuda {
template void elementwise(const Elementwise<SquaredRelu>&, Stream);
template void elementwise(const ElementwiseBackward<SquaredRelu>&, Stream);
}  // namespace assay::ops::cuda
