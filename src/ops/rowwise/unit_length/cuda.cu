// Rows of unit length on CUDA.
#include "ops/cuda/rowwise.cuh"
#include "ops/rowwise/unit_length/unit_length.h"

namespace assay::ops::cuda {
ASSAY_ROWWISE_CUDA(UnitLength)
}  // namespace assay::ops::cuda
