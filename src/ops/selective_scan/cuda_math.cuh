#pragma once
// Functions of one number, as exact as T's own precision asks, and sums over the channels of a warp.
#include "ops/cuda.cuh"

namespace assay::ops::cuda {

constexpr float kLog2e = 1.4426950408889634f;

// 2^x by the special-function unit: two units in the last place.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float exp_fast(float x) { return exp2_fast(x * kLog2e); }
__device__ inline float sigmoid(float x) { return __fdividef(1.f, 1.f + exp_fast(-x)); }

// silu(z) and its derivative.
struct Gate {
  float value, slope;
  __device__ explicit Gate(float z) {
    const float s = sigmoid(z);
    value = z * s, slope = s * (1 + z * (1 - s));
  }
};

// softplus(x) = x > 20 ? x : log1p(exp(x)). For bf16 log1p(e) is log(1 + e), or e − e²/2 where 1 + e loses e's last
// bits.
template <class T>
__device__ float softplus(float x) {
  const float e = exp_fast(x);
  float y;
  if constexpr (sizeof(T) == 2) y = e < 0x1p-8f ? e - 0.5f * e * e : __logf(1 + e);
  else y = log1pf(e);
  return x > 20.f ? x : y;
}
// The derivative of softplus where it is y: σ(x) = 1 − exp(−y).
template <class T>
__device__ float softplus_slope(float y) {
  if constexpr (sizeof(T) == 2) return y < 0x1p-8f ? y - 0.5f * y * y : 1 - exp_fast(-y);
  else return -expm1f(-y);
}

// Sums over the 32 lanes of a warp by m16n8k8 matrix products with matrices of zeros and ones: a product sums over the
// four lanes of a quad, and two more bring the eight quads side by side and sum over them. bf16 is content with tf32's
// 11 bits; for fp32 a number goes in as the sum of two.
template <class T>
struct WarpSum {
  int quad = threadIdx.x % 32 / 4, within = threadIdx.x % 4;

  // Column `column` of the 16 × 8 `result` += Σ_lane value. Every lane of the warp calls it.
  __device__ void add(float (&result)[4], int column, const float (&value)[16]) const {
    float sums[4] = {}, turned[4] = {};  // sums: numbers 4·within + k of the own quad; turned: 16 numbers × 8 quads
#pragma unroll
    for (int m = 0; m < 4; ++m)
      data_left(sums, value[4 * m], value[4 * m + 2], value[4 * m + 1], value[4 * m + 3], is(2 * m), is(2 * m + 1));
    data_right(turned, at(0), at(0 - 8), at(1), at(1 - 8), sums[0], sums[1]);
    data_right(turned, at(2), at(2 - 8), at(3), at(3 - 8), sums[2], sums[3]);
    data_left(result, turned[0], turned[2], turned[1], turned[3], is(column), is(column));
  }
  // Where the lane's k-th number of a result lies.
  __device__ int row(int k) const { return quad + k / 2 * 8; }
  __device__ int column(int k) const { return within * 2 + k % 2; }

 private:
  __device__ float is(int i) const { return quad == i ? 1.f : 0.f; }
  __device__ float at(int i) const { return quad == 4 * within + i ? 1.f : 0.f; }
  __device__ static void data_left(float (&c)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    multiply(c, tf32(a0), tf32(a1), tf32(a2), tf32(a3), b0, b1);
    if constexpr (sizeof(T) > 2) multiply(c, a0 - tf32(a0), a1 - tf32(a1), a2 - tf32(a2), a3 - tf32(a3), b0, b1);
  }
  __device__ static void data_right(float (&c)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    multiply(c, a0, a1, a2, a3, tf32(b0), tf32(b1));
    if constexpr (sizeof(T) > 2) multiply(c, a0, a1, a2, a3, b0 - tf32(b0), b1 - tf32(b1));
  }
  // A product ignores the last 13 bits of its operands; fp32 has to know which number it took.
  __device__ static float tf32(float x) {
    return sizeof(T) == 2 ? x : __uint_as_float(__float_as_uint(x) & 0xffffe000u);
  }
  __device__ static void multiply(float (&c)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)),
          "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
  }
};

}  // namespace assay::ops::cuda
