#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "ops/core/cuda_target.h"
#include "ops/cuda/launch.cuh"

namespace assay::ops {
namespace {

CudaTarget highest_allowed() {
  const char* variable = std::getenv("ASSAY_CUDA_TARGET");
  const std::string wanted = variable ? variable : "sm_90a";
  if (wanted == "sm_90a") return CudaTarget::sm_90a;
  if (wanted == "compute_80") return CudaTarget::compute_80;
  if (wanted == "none") return CudaTarget::none;
  throw BadInput("ASSAY_CUDA_TARGET is '" + wanted + "', expected none, compute_80 or sm_90a");
}

std::vector<CudaTarget> targets() {
  const CudaTarget highest = highest_allowed();
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) static_cast<void>(cudaGetLastError());
  std::vector<CudaTarget> found;
  for (int device = 0; device < count; ++device) {
    int major = 0;
    cuda::check_cuda("compute capability",
                     cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    const CudaTarget target = major == 9  ? CudaTarget::sm_90a
                              : major > 7 ? CudaTarget::compute_80
                                          : CudaTarget::none;
    found.push_back(std::min(target, highest));
  }
  return found;
}

}  // namespace

CudaTarget cuda_target(int device) {
  static const std::vector<CudaTarget> of_devices = targets();
  if (device < 0 && cudaGetDevice(&device) != cudaSuccess) static_cast<void>(cudaGetLastError());
  return device >= 0 && size_t(device) < of_devices.size() ? of_devices[size_t(device)]
                                                           : CudaTarget::none;
}

}  // namespace assay::ops
