#include "ops/paths.h"

#include <map>

#include "ops/cpu.h"

namespace assay::ops {
namespace {
std::map<std::string, bool>& has_kernels() {
  static std::map<std::string, bool> ops;
  return ops;
}
std::string kernel_path(const std::string& device) {
  if (device == "cpu") return "cpu kernel (Highway " + cpu_target() + ")";
  return kCudaKernels ? "cuda kernel sm_90a" : "composed from tensor arithmetic: built without CUDA";
}
}  // namespace

bool register_kernels(const std::string& op) { return has_kernels()[op] = true; }
bool register_composed(const std::string& op) { return has_kernels().emplace(op, false).second; }

std::vector<OpPath> op_paths() {
  std::vector<OpPath> paths;
  for (const auto& [op, kernels] : has_kernels())
    for (const char* device : {"cpu", "cuda"})
      paths.push_back({op, device, kernels ? kernel_path(device) : "composed from tensor arithmetic"});
  return paths;
}

}  // namespace assay::ops
