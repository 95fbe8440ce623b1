#include "ops/core/paths.h"

#include <map>

#include "ops/core/cpu_target.h"

namespace assay::ops {
namespace {
struct Paths {
  std::string cpu;
  std::string cuda;
  int cuda_numerics;
  int cpu_numerics;
};
std::map<std::string, Paths>& registered() {
  static std::map<std::string, Paths> ops;
  return ops;
}
constexpr const char* kComposed = "composed from tensor arithmetic";
}  // namespace

bool register_paths(const std::string& op, const std::string& cpu, const std::string& cuda,
                    int cuda_numerics, int cpu_numerics) {
  return registered().emplace(op, Paths{cpu, cuda, cuda_numerics, cpu_numerics}).second;
}
std::string cpu_kernel_path() { return "cpu kernel (Highway " + cpu_target() + ")"; }
bool register_kernels(const std::string& op, int numerics) {
  return register_paths(op, cpu_kernel_path(),
                        kCudaKernels ? "cuda kernel sm_90a or compute_80"
                                     : std::string(kComposed) + ": built without CUDA",
                        numerics, numerics);
}

std::vector<OpPath> op_paths() {
  std::vector<OpPath> paths;
  for (const auto& [op, path] : registered()) {
    paths.push_back({op, "cpu", path.cpu, path.cpu_numerics});
    paths.push_back({op, "cuda", path.cuda, path.cuda_numerics});
  }
  return paths;
}

}  // namespace assay::ops
