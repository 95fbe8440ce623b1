// RWKV-7's element-wise parts on CUDA.
#include "ops/cuda/rowwise.cuh"
#include "ops/rowwise/rwkv7_elements/kernel.h"

namespace assay::ops::cuda {
ASSAY_ROWWISE_CUDA(Rwkv7Prepare)
ASSAY_ROWWISE_CUDA(Rwkv7Values)
ASSAY_ROWWISE_CUDA(Rwkv7Output)
}  // namespace assay::ops::cuda
