// The inputs of a delta rule with a decay per channel on CUDA.
#include "ops/cuda/rowwise.cuh"
#include "ops/rowwise/delta_inputs/kernel.h"

namespace assay::ops::cuda {
ASSAY_ROWWISE_CUDA(KdaInputsUnbounded)
ASSAY_ROWWISE_CUDA(KdaInputsBounded)
ASSAY_ROWWISE_CUDA(Gdn2Inputs)
}  // namespace assay::ops::cuda
