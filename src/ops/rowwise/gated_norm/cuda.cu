// Gated root-mean-square norms on CUDA.
#include "ops/cuda/rowwise.cuh"
#include "ops/rowwise/gated_norm/gated_norm.h"

namespace assay::ops::cuda {
ASSAY_ROWWISE_CUDA(GateThenNorm)
ASSAY_ROWWISE_CUDA(NormThenGate)
ASSAY_ROWWISE_CUDA(NormThenSigmoid)
}  // namespace assay::ops::cuda
