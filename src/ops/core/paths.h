#pragma once
// Which path every operator takes on every device, and why: `assay doctor` lists it and results are
// stored with it.
#include <string>
#include <vector>

#include "base/build.h"

namespace assay::ops {

struct OpPath {
  // "selective_scan", "cuda"
  std::string op;
  std::string device;
  std::string path;  // "cuda kernel sm_90a" | "composed from tensor arithmetic: …"
  // Raised when the results of the operator change by more than rounding: statistics never mix
  // versions. The identity of a run has the versions above 1 of the operators that it calls, so an
  // operator that is new, or that replaces others with equal results, changes no identity.
  int numerics = 1;
};
std::vector<OpPath> op_paths();  // by op, then device

struct OperatorInfo {
  // "gla", "gla(Tensor q, …) -> …", one line
  std::string name;
  std::string schema;
  std::string about;
};
// The public operators of torch.ops.assay, by name. op_paths() also has what only the modules of
// Assay call.
std::vector<OperatorInfo> public_operators();

#ifdef ASSAY_CUDA
constexpr bool kCudaKernels = true;
#else
// built without nvcc: on CUDA tensors an op is composed from tensor arithmetic
constexpr bool kCudaKernels = false;
#endif

// For the file that defines an op: `const bool registered = register_kernels("selective_scan");`
// when it has a kernel for the CPU and one for CUDA; register_paths names each path.
bool register_kernels(const std::string& op, int numerics = 1);
bool register_paths(const std::string& op, const std::string& cpu, const std::string& cuda,
                    int cuda_numerics = 1, int cpu_numerics = 1);
std::string cpu_kernel_path();  // "cpu kernel (Highway AVX3)"

}  // namespace assay::ops
