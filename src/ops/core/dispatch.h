#pragma once
// Runs a kernel on the device of its tensors.
#include <c10/core/DeviceGuard.h>

#include "ops/core/parallel.h"
#include "ops/core/paths.h"
#include "ops/core/tensors.h"

namespace assay::ops {

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
