#pragma once
// The CUDA kernels that a GPU runs.

namespace assay::ops {

// A later target has the kernels of the earlier ones.
enum class CudaTarget {
  none,        // every operator is composed of torch operations
  compute_80,  // kernels without instructions of sm_90a: GPUs of compute capability 8.0 or more
  sm_90a,      // all kernels: Hopper
};
// The target of GPU `device`, or of the current one if `device` is negative; none without a GPU.
// $ASSAY_CUDA_TARGET = none or compute_80 makes it lower, so that a Hopper GPU takes the paths of
// other GPUs. Throws BadInput if the variable has another value.
CudaTarget cuda_target(int device = -1);

}  // namespace assay::ops
