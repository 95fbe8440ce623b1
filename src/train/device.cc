#include "train/device.h"

#include <malloc.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <fstream>

#include "base/build.h"
#include "base/error.h"
#ifdef ASSAY_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>
#endif

namespace assay::train {

// Every step asks for the same tensors again. Memory that goes back to the system in between comes
// zeroed, page by page.
void set_up_torch() {
  // cuBLAS is deterministic only with a workspace of its own.
  ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 0);
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
  ::mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the most that glibc takes
  ::mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
}

c10::Device choose_device(const std::string& name) {
  const int64_t gpus = torch::cuda::is_available() ? int64_t(torch::cuda::device_count()) : 0;
  if (name == "auto") return c10::Device(gpus ? "cuda:0" : "cpu");
  if (name == "cpu") return c10::Device("cpu");
  if (!name.starts_with("cuda"))
    fail("device '{}' is unknown; there are auto, cpu, cuda, cuda:N", name);
  const std::string number = name == "cuda"                      ? "0"
                             : name.size() > 5 && name[4] == ':' ? name.substr(5)
                                                                 : "x";
  if (number.find_first_not_of("0123456789") != std::string::npos)
    fail("device '{}' is unknown; expected cuda or cuda:N", name);
  if (gpus == 0)
    fail("device '{}': no CUDA device found (`assay doctor` says why); choose cpu", name);
  if (std::stoll(number) >= gpus)
    fail("device '{}': there are {} GPUs, numbered from 0", name, gpus);
  return c10::Device(c10::kCUDA, c10::DeviceIndex(std::stoi(number)));
}

std::vector<std::string> gpu_names() {
  std::vector<std::string> names;
  const size_t count = torch::cuda::is_available() ? torch::cuda::device_count() : 0;
  for (size_t i = 0; i < count; ++i)
    names.push_back(device_name(c10::Device(c10::kCUDA, c10::DeviceIndex(i))));
  return names;
}

std::string torch_version() { return TORCH_VERSION; }

void use_threads(int threads) {
  if (threads > 0) at::set_num_threads(threads);
}

std::string device_name(c10::Device device) {
  const auto threads = [] {
    const int count = at::get_num_threads();
    return fmt::format("{} thread{}", count, count == 1 ? "" : "s");
  };
#ifdef ASSAY_CUDA
  if (device.is_cuda()) return at::cuda::getDeviceProperties(device.index())->name;
#endif
  if (device.is_cuda()) return "CUDA device";
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("model name"))
      return fmt::format("{}, {}", line.substr(line.find(':') + 2), threads());
  return "CPU, " + threads();
}

at::ScalarType compute_dtype(const std::string& precision, c10::Device device) {
  if (precision == "bf16" || (precision == "auto" && device.is_cuda())) return at::kBFloat16;
  return precision == "fp64" ? at::kDouble : at::kFloat;
}

double peak_flops(c10::Device device) {
  const std::string name = device_name(device);
  if (name.find("H100") != std::string::npos || name.find("H200") != std::string::npos)
    return 989e12;
  if (name.find("A100") != std::string::npos) return 312e12;
  const int64_t size = device.is_cuda() ? 8192 : 1024;
  const at::Tensor a = at::ones({size, size}, at::TensorOptions().device(device).dtype(
                                                  device.is_cuda() ? at::kBFloat16 : at::kFloat));
  double best = 1e9;
  for (int i = 0; i < 4; ++i) {
    const auto start = std::chrono::steady_clock::now();
    at::mm(a, a)[0][0].item();
    best = std::min(
        best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return 2.0 * double(size) * double(size) * double(size) / best;
}

int64_t peak_memory_bytes(c10::Device device) {
#ifdef ASSAY_CUDA
  if (device.is_cuda())
    return c10::cuda::CUDACachingAllocator::getDeviceStats(device.index()).allocated_bytes[0].peak;
#endif
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return int64_t(usage.ru_maxrss) * 1024;
}

void synchronize(c10::Device device) {
  if (device.is_cuda()) torch::cuda::synchronize(device.index());
}

}  // namespace assay::train
