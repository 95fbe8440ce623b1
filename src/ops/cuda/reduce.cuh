#pragma once
// Sums, maxima and scans over lanes, warps and rows. Their order is fixed, so results repeat
// bit by bit.
#include "ops/cuda/launch.cuh"
#include "ops/cuda/ptx.cuh"

namespace assay::ops::cuda {

struct Plus {
  template <class T>
  __device__ T operator()(T x, T y) const {
    return x + y;
  }
};
struct Max {
  __device__ float operator()(float x, float y) const { return fmaxf(x, y); }
  __device__ double operator()(double x, double y) const { return fmax(x, y); }
};

// x of lanes whose numbers differ in the bits [kFirst, kEnd), reduced in each of them, from the
// lowest bit to the highest.
template <int kFirst, int kEnd, class T, class F>
__device__ T butterfly(T x, F f) {
#pragma unroll
  for (int step = kFirst; step < kEnd; step *= 2) x = f(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
// butterfly for sums of several numbers, whose shuffles are interleaved.
template <int kFirst, int kEnd, int N>
__device__ void butterfly_sum(float (&x)[N]) {
#pragma unroll
  for (int step = kFirst; step < kEnd; step *= 2)
#pragma unroll
    for (int n = 0; n < N; ++n) x[n] += __shfl_xor_sync(~0u, x[n], step);
}
template <class T>
__device__ T quad_sum(T x) {
  return butterfly<1, 4>(x, Plus{});
}
template <class T>
__device__ T quad_max(T x) {
  return butterfly<1, 4>(x, Max{});
}
// Over each group of kLanes lanes, a power of two, from the highest bit to the lowest.
template <int kLanes, class T, class F>
__device__ T group_reduce(T x, F f) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x = f(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
// group_reduce for a sum over a number of lanes that is not known when the kernel is compiled.
template <class T>
__device__ T group_sum(T x, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
template <class T>
__device__ T warp_sum(T x) {
  return group_sum(x, 32);
}

// The sum of x over the lanes up to this one.
template <class T>
__device__ T warp_inclusive_scan(T x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(~0u, x, step);
    if (lane >= step) x += other;
  }
  return x;
}

// The sum of v[i] over kLanes lanes, for all i < kValues at once: every shuffle halves the values
// that a lane holds. Lane l of kLanes returns value l · kValues / kLanes.
template <int kLanes, int kValues>
__device__ float transposed_sum(float (&v)[kValues]) {
  if constexpr (kValues == 1) {
    return group_reduce<kLanes>(v[0], Plus{});
  } else {
    constexpr int kHalf = kValues / 2;
    constexpr int kMask = kLanes / 2;
    const bool upper = threadIdx.x & kMask;
    float sums[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float low = v[i];
      const float high = v[i + kHalf];
      sums[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, kMask);
    }
    return transposed_sum<kMask>(sums);
  }
}

// out[column] = Σ_row in[row, column]; the order of rows depends on their number alone.
template <class R>
__global__ void __launch_bounds__(256)
    sum_rows_kernel(const R* in, R* out, int64_t rows, int64_t columns) {
  __shared__ R part[8][33];
  const int x = threadIdx.x % 32;
  const int y = threadIdx.x / 32;
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
// A null `out` is not wanted.
template <class R>
void sum_rows(const R* in, void* out, int64_t rows, int64_t columns, Stream stream) {
  if (!out) return;
  launch_kernel(sum_rows_kernel<R>, unsigned(ceil_div(columns, 32)), 256, 0, stream, in,
                static_cast<R*>(out), rows, columns);
}

}  // namespace assay::ops::cuda
