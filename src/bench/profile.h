#pragma once
// Where the time of some work goes, by torch's profiler.
#include <c10/core/Device.h>

#include <functional>
#include <string>
#include <vector>

namespace assay::bench {

// On CUDA a kernel and torch's operator that launched it, if one did. Kernels that overlap count in
// full, and the time between kernels, in which none runs, is one row. On the CPU an operator alone,
// without the time of those that it calls; what is outside of them, this project's operators
// forward, is one row.
constexpr const char* kIdle = "no kernel";
constexpr const char* kOutside = "outside torch's operators";
struct TimeSpent {
  std::string op;
  std::string kernel;
  int64_t calls = 0;
  double seconds = 0;  // of all calls
};
// Profile of one run of `work`, sorted by decreasing time. Run `work` once before profiling it.
std::vector<TimeSpent> profile(c10::Device device, const std::function<void()>& work);

}  // namespace assay::bench
