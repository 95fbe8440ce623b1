#pragma once
// Code shared by the benchmarks of CUDA kernels: random data, medians of event timings, and the
// limits of the machine.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/types.cuh"

namespace assay::ops {

using cuda::bf16;

inline void must(cudaError_t error) {
  if (error != cudaSuccess) {
    std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
    std::exit(1);
  }
}

// low + (high − low) · a number in [0, 1) that depends on its index.
template <class T>
__global__ void fill(T* out, int64_t count, float low, float high, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint64_t x = (uint64_t(i) + seed) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9u;
    x ^= x >> 32;
    out[i] = cuda::from_compute<T>(low + (high - low) * float(x >> 40) * 0x1p-24f);
  }
}

struct Buffers {
  std::vector<void*> all;
  uint64_t seed = 1;
  ~Buffers() {
    for (void* p : all) cudaFree(p);
  }
  void* raw(size_t bytes) {
    void* p = nullptr;
    must(cudaMalloc(&p, bytes + 256));
    all.push_back(p);
    return p;
  }
  template <class T>
  T* random(int64_t count, float low, float high) {
    T* p = static_cast<T*>(raw(count * sizeof(T)));
    fill<<<1024, 256>>>(p, count, low, high, seed++ << 40);
    return p;
  }
  View sequence(int64_t batch, int64_t time, int64_t width, float low = -1.7f, float high = 1.7f) {
    return {random<bf16>(batch * time * width, low, high), time * width, width};
  }
};

inline double median_ms(const std::function<void()>& call) {
  cudaEvent_t begin;
  cudaEvent_t end;
  must(cudaEventCreate(&begin));
  must(cudaEventCreate(&end));
  std::vector<float> times(30);
  for (int i = 0; i < 3; ++i) call();
  for (float& ms : times) {
    must(cudaEventRecord(begin));
    call();
    must(cudaEventRecord(end));
    must(cudaEventSynchronize(end));
    must(cudaEventElapsedTime(&ms, begin, end));
  }
  must(cudaEventDestroy(begin));
  must(cudaEventDestroy(end));
  std::nth_element(times.begin(), times.begin() + 15, times.end());
  return times[15];
}

// The peak rates of the GPU. The program ends with a message if there is none.
struct Machine {
  // the last two by the clock
  double bytes_per_ms;
  double exponentials_per_ms;
  double bf16_flops_per_ms;
  // The longest of the times that memory, tensor cores and special-function units need.
  double floor_ms(double bytes, double flops = 0, double exponentials = 0) const {
    return std::max(
        {bytes / bytes_per_ms, flops / bf16_flops_per_ms, exponentials / exponentials_per_ms});
  }
  Machine() {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
      std::puts("no CUDA device found: nothing was timed");
      std::exit(0);
    }
    cudaDeviceProp p;
    int clock_khz = 0;
    must(cudaGetDeviceProperties(&p, 0));
    must(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, 0));
    exponentials_per_ms = 16.0 * p.multiProcessorCount * clock_khz;
    bf16_flops_per_ms = 4096.0 * p.multiProcessorCount * clock_khz;
    Buffers buffers;
    const int64_t size = int64_t{2} << 30;
    float* from = buffers.random<float>(size / 4, 0, 1);
    float* to = static_cast<float*>(buffers.raw(size));
    bytes_per_ms = 2.0 * size / median_ms([&] {
                     must(cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice));
                   });
    std::printf("%s, %d SMs, %.2f GHz, copy %.2f TB/s\n", p.name, p.multiProcessorCount,
                clock_khz * 1e-6, bytes_per_ms * 1e-9);
  }
};

inline void row(const char* what, double ms, double floor) {
  std::printf("  %-34s %8.3f ms   floor %7.3f ms   %4.0f %%\n", what, ms, floor, 100 * floor / ms);
}

}  // namespace assay::ops
