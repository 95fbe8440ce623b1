// Times of the CUDA kernels of selective_scan and causal_conv1d beside their floors, on random data. Medians of 30
// calls. The floor is the longer of two times: the bytes of the operands, each moved once, at the bandwidth of a copy
// measured here; and the B·T·Dm·N exponentials, at the 16 a clock that a multiprocessor's special-function units do.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <vector>

#include "ops/causal_conv1d/kernel.h"
#include "ops/cuda.cuh"
#include "ops/selective_scan/kernel.h"

namespace {

using namespace assay::ops;
using cuda::bf16;

void must(cudaError_t error) {
  if (error != cudaSuccess) std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error)), std::exit(1);
}

// low + (high − low) · a number in [0, 1) that depends on its index.
template <class T>
__global__ void fill(T* out, int64_t count, float low, float high, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    uint64_t x = (uint64_t(i) + seed) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9u, x ^= x >> 32;
    out[i] = cuda::stored<T>(low + (high - low) * float(x >> 40) * 0x1p-24f);
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

double median_ms(const std::function<void()>& call) {
  cudaEvent_t begin, end;
  must(cudaEventCreate(&begin)), must(cudaEventCreate(&end));
  std::vector<float> times(30);
  for (int i = 0; i < 3; ++i) call();
  for (float& ms : times) {
    must(cudaEventRecord(begin));
    call();
    must(cudaEventRecord(end));
    must(cudaEventSynchronize(end));
    must(cudaEventElapsedTime(&ms, begin, end));
  }
  must(cudaEventDestroy(begin)), must(cudaEventDestroy(end));
  std::nth_element(times.begin(), times.begin() + 15, times.end());
  return times[15];
}

struct Machine {
  double bytes_per_ms, exponentials_per_ms;
  Machine() {
    cudaDeviceProp p;
    int clock_khz = 0;
    must(cudaGetDeviceProperties(&p, 0)), must(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, 0));
    exponentials_per_ms = 16.0 * p.multiProcessorCount * clock_khz;
    Buffers buffers;
    const int64_t size = int64_t{2} << 30;
    float *from = buffers.random<float>(size / 4, 0, 1), *to = static_cast<float*>(buffers.raw(size));
    bytes_per_ms = 2.0 * size / median_ms([&] { must(cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice)); });
    std::printf("%s, %d multiprocessors, %.2f GHz, copy %.2f TB/s\n", p.name, p.multiProcessorCount, clock_khz * 1e-6,
                bytes_per_ms * 1e-9);
  }
};

void row(const char* what, double ms, double floor) {
  std::printf("  %-34s %8.3f ms   floor %7.3f ms   %4.0f %%\n", what, ms, floor, 100 * floor / ms);
}

void scan(const Machine& machine, int64_t B, int64_t T, int64_t M, int64_t N) {
  Buffers buffers;
  auto real = [&](int64_t count, float low, float high) { return buffers.random<float>(count, low, high); };
  SelectiveScanForward p{
      .dtype = DType::bf16, .batch = B, .time = T, .channels = M, .groups = 1, .state_size = N, .delta_softplus = true};
  p.u = buffers.sequence(B, T, M), p.delta = buffers.sequence(B, T, M), p.z = buffers.sequence(B, T, M);
  p.B = buffers.sequence(B, T, N), p.C = buffers.sequence(B, T, N), p.y = buffers.sequence(B, T, M);
  p.A = real(M * N, -16, -0.5f), p.D = real(M, 0, 1), p.delta_bias = real(M, -6, -3);
  p.final_state = real(B * M * N, 0, 1),
  p.chunk_states = real(B * cuda::ceil_div(T, cuda::chunk_size(p)) * M * N, 0, 1);
  SelectiveScanBackward q{.forward = p, .dy = buffers.sequence(B, T, M)};
  q.du = buffers.sequence(B, T, M), q.ddelta = buffers.sequence(B, T, M), q.dz = buffers.sequence(B, T, M);
  q.dB = real(B * T * N, 0, 1), q.dC = real(B * T * N, 0, 1), q.dA = real(M * N, 0, 1), q.dD = real(M, 0, 1);
  q.ddelta_bias = real(M, 0, 1);
  void *forward = buffers.raw(cuda::workspace_bytes(p)), *backward = buffers.raw(cuda::workspace_bytes(q));

  std::printf(
      "selective_scan bf16, B %ld, T %ld, Dm %ld, N %ld: chunks of %ld, workspace %.0f + %.0f MB, states %.0f MB\n",
      long(B), long(T), long(M), long(N), long(cuda::chunk_size(p)), cuda::workspace_bytes(p) * 1e-6,
      cuda::workspace_bytes(q) * 1e-6, B * cuda::ceil_div(T, cuda::chunk_size(p)) * M * N * 4e-6);
  const double elements = double(B) * T * M, inputs = double(B) * T * N,
               exponentials = elements * N / machine.exponentials_per_ms;
  const double forward_bytes = 8 * elements + 4 * inputs, backward_bytes = 14 * elements + 12 * inputs;
  const double forward_ms = median_ms([&] { cuda::selective_scan(p, forward, nullptr); });
  const double both_ms = median_ms([&] {
    cuda::selective_scan(p, forward, nullptr);
    cuda::selective_scan(q, backward, nullptr);
  });
  must(cudaDeviceSynchronize());
  row("forward", forward_ms, std::max(exponentials, forward_bytes / machine.bytes_per_ms));
  row("forward + backward", both_ms,
      std::max(exponentials, forward_bytes / machine.bytes_per_ms) +
          std::max(exponentials, backward_bytes / machine.bytes_per_ms));
}

void conv(const Machine& machine, int64_t B, int64_t T, int64_t M, int64_t K) {
  Buffers buffers;
  CausalConv1dForward p{.dtype = DType::bf16, .batch = B, .time = T, .channels = M, .width = K, .silu = true};
  p.x = buffers.sequence(B, T, M), p.y = buffers.sequence(B, T, M);
  p.weight = buffers.random<float>(M * K, -1, 1), p.bias = buffers.random<float>(M, -1, 1);
  p.final_state = buffers.random<float>(B * M * K, -1, 1);
  CausalConv1dBackward q{.forward = p, .dy = buffers.sequence(B, T, M)};
  q.dx = buffers.sequence(B, T, M), q.dweight = buffers.random<float>(M * K, -1, 1),
  q.dbias = buffers.random<float>(M, -1, 1);
  void* workspace = buffers.raw(cuda::workspace_bytes(q));
  std::printf("causal_conv1d bf16, B %ld, T %ld, Dm %ld, K %ld\n", long(B), long(T), long(M), long(K));
  const double elements = double(B) * T * M;
  row("forward", median_ms([&] { cuda::causal_conv1d(p, nullptr); }), 4 * elements / machine.bytes_per_ms);
  row("backward", median_ms([&] { cuda::causal_conv1d(q, workspace, nullptr); }), 6 * elements / machine.bytes_per_ms);
  must(cudaDeviceSynchronize());
}

}  // namespace

int main() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) return std::puts("no GPU is seen: nothing was timed"), 0;
  const Machine machine;
  for (auto [B, T] : {std::pair{8, 2048}, std::pair{1, 102400}})
    scan(machine, B, T, 1536, 16), conv(machine, B, T, 1536, 4);
}
