#pragma once
// Functions of one number. Where there are several precisions of one function, an operator keeps
// the one that it was published with, so that its results do not change.
#include "ops/cuda/ptx.cuh"

namespace assay::ops::cuda {

__device__ inline float rsqrt(float x) { return rsqrtf(x); }
__device__ inline double rsqrt(double x) { return 1 / sqrt(x); }

__device__ inline float exp_intrinsic(float x) { return __expf(x); }
__device__ inline double exp_intrinsic(double x) { return exp(x); }
__device__ inline float exp_approx(float x) { return ex2_approx(x * kLog2e); }
__device__ inline float exp2_any(float x) { return ex2_approx(x); }
__device__ inline double exp2_any(double x) { return exp2(x); }

// 1 / (1 + exp(−x)) with the division of R, with an approximate division, and with an
// approximate exp too.
template <class R>
__device__ R sigmoid(R x) {
  return 1 / (1 + exp_intrinsic(-x));
}
__device__ inline double sigmoid_fast(double x) { return sigmoid(x); }
// exp_approx(x) differs from exp_intrinsic(x) only where both are less than 2^-126.
__device__ inline float sigmoid_approx(float x) { return __fdividef(1.f, 1.f + exp_approx(-x)); }
__device__ inline float sigmoid_fast(float x) { return sigmoid_approx(x); }

// silu(z) and its derivative.
struct SiluGate {
  float value;
  float slope;
  __device__ explicit SiluGate(float z) {
    const float s = sigmoid_approx(z);
    value = z * s;
    slope = s * (1 + z * (1 - s));
  }
};

// softplus(x) = x > 20 ? x : log1p(exp(x)), as exact as numbers of T. For bf16 log1p(e) is log(1 +
// e), or e − e² / 2 where 1 + e loses the last bits of e.
template <class T>
__device__ float softplus(float x) {
  const float e = exp_approx(x);
  float y;
  if constexpr (sizeof(T) == 2) y = e < 0x1p-8f ? e - 0.5f * e * e : __logf(1 + e);
  else y = log1pf(e);
  return x > 20.f ? x : y;
}
// The derivative of softplus where it is y: σ(x) = 1 − exp(−y).
template <class T>
__device__ float softplus_slope(float y) {
  if constexpr (sizeof(T) == 2) return y < 0x1p-8f ? y - 0.5f * y * y : 1 - exp_approx(-y);
  else return -expm1f(-y);
}

}  // namespace assay::ops::cuda
