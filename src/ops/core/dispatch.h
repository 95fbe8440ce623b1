#pragma once
// Runs a kernel on the device of its tensors.
#include <c10/core/DeviceGuard.h>

#include "ops/core/cuda_target.h"
#include "ops/core/parallel.h"
#include "ops/core/paths.h"
#include "ops/core/tensors.h"

namespace assay::ops {

// Whether a device is a GPU that runs the kernels for compute_80, or all kernels. Operators whose
// kernels need Hopper ask the second question.
inline bool on_gpu(const at::Device& device) {
  if constexpr (kCudaKernels)
    return device.is_cuda() && cuda_target(device.index()) != CudaTarget::none;
  return false;
}
inline bool on_hopper(const at::Device& device) {
  if constexpr (kCudaKernels)
    return device.is_cuda() && cuda_target(device.index()) == CudaTarget::sm_90a;
  return false;
}
constexpr const char* kNeedsHopper = "takes GPUs of compute capability 9.0";

// Calls on_cuda(stream) with the device's guard and current stream, or on_cpu(pool). on_cuda is a
// generic lambda: a build without CUDA does not instantiate it, so its kernels need not exist.
template <class OnCpu, class OnCuda>
void dispatch(const at::Device& device, OnCpu&& on_cpu, [[maybe_unused]] OnCuda&& on_cuda) {
  if constexpr (kCudaKernels) {
    if (device.is_cuda()) {
      const c10::DeviceGuard guard(device);
      return on_cuda(current_stream(device));
    }
  }
  on_cpu(at_parallel_for());
}

}  // namespace assay::ops
