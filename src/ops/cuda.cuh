#pragma once
// What the CUDA kernels share: numbers as they are stored and as they are computed, sums in a fixed order, and launches
// that report their errors.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <string>

#include "ops/kernel.h"

namespace assay::ops::cuda {

using bf16 = __nv_bfloat16;

template <class T>
struct RealOf {
  using type = float;
};
template <>
struct RealOf<double> {
  using type = double;
};
template <class T>
using Real = typename RealOf<T>::type;  // what a tensor of T is computed in

__host__ __device__ inline float real(float x) { return x; }
__host__ __device__ inline double real(double x) { return x; }
__host__ __device__ inline float real(bf16 x) { return __bfloat162float(x); }
template <class T>
__host__ __device__ inline T stored(Real<T> x) {
  if constexpr (sizeof(T) == 2) return __float2bfloat16(x);
  else return x;
}

__device__ inline float inverse_root(float x) { return rsqrtf(x); }
__device__ inline double inverse_root(double x) { return 1 / sqrt(x); }

// Numbers that are read and written at once.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T at[kWidth];
};

// f(T{}) for the type that `dtype` names.
template <class F>
decltype(auto) with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f(float{});
    case DType::f64:
      return f(double{});
    default:
      return f(bf16{});
  }
}

// Not fail<Error>(): nvcc does not take fmt's compile-time check of its format string.
inline void check_launch(const char* what) {
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess)
    throw Error(std::string(what) + ": the kernel could not be launched: " + cudaGetErrorString(error));
}

// A launch with more shared memory than the 48 KB that every kernel may have.
template <class... Parameters, class... Arguments>
void launch_shared(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, size_t bytes, cudaStream_t stream,
                   const Arguments&... arguments) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
  kernel<<<blocks, threads, bytes, stream>>>(arguments...);
}

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Hands out pieces of a workspace, each aligned to 256 bytes. With a null base it only counts.
struct Arena {
  char* base = nullptr;
  size_t used = 0;
  template <class T>
  T* take(int64_t count) {
    T* piece = base ? reinterpret_cast<T*>(base + used) : nullptr;
    used += (size_t(count) * sizeof(T) + 255) / 256 * 256;
    return piece;
  }
};

// out[column] = Σ_row in[row, column], rows in an order that depends on their number alone.
template <class R>
__global__ void __launch_bounds__(256) sum_rows_kernel(const R* in, R* out, int64_t rows, int64_t columns) {
  __shared__ R part[8][33];
  const int x = threadIdx.x % 32, y = threadIdx.x / 32;
  const int64_t column = blockIdx.x * int64_t{32} + x;
  R sum = 0;
  if (column < columns) {
#pragma unroll 4
    for (int64_t row = y; row < rows; row += 8) sum += in[row * columns + column];
  }
  part[y][x] = sum;
  __syncthreads();
  if (y > 0 || column >= columns) return;
  for (int i = 1; i < 8; ++i) sum += part[i][x];
  out[column] = sum;
}

template <class R>
void sum_rows(const R* in, void* out, int64_t rows, int64_t columns, cudaStream_t stream) {
  sum_rows_kernel<R><<<unsigned(ceil_div(columns, 32)), 256, 0, stream>>>(in, static_cast<R*>(out), rows, columns);
  check_launch("sum_rows");
}

}  // namespace assay::ops::cuda
