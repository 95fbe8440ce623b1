#pragma once
// Number types of the kernels, vectors of them, and functions of one number.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "ops/core/kernel.h"

namespace assay::ops::cuda {

using bf16 = __nv_bfloat16;

constexpr double kLog2eDouble = 1.4426950408889634;
constexpr double kLn2Double = 0.6931471805599453;
constexpr float kLog2e = float(kLog2eDouble);
constexpr float kLn2 = float(kLn2Double);

// The type in which tensors of T are computed: double for double, else float.
template <class T>
using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;

__host__ __device__ inline float to_compute(float x) { return x; }
__host__ __device__ inline double to_compute(double x) { return x; }
__host__ __device__ inline float to_compute(bf16 x) { return __bfloat162float(x); }
template <class T>
__host__ __device__ inline T from_compute(Real<T> x) {
  if constexpr (sizeof(T) == 2) return __float2bfloat16(x);
  else return x;
}

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

// kSize numbers that lie together, aligned for the widest loads and stores that they allow.
template <class T, int kSize>
struct alignas(sizeof(T) * kSize < 16 ? sizeof(T) * kSize : 16) Vec {
  T at[kSize];
  __device__ T& operator[](int i) { return at[i]; }
  __device__ T operator[](int i) const { return at[i]; }
};

// Four numbers in registers, zeros at first.
struct Vec4 {
  float at[4] = {};
  __device__ float& operator[](int i) { return at[i]; }
  __device__ float operator[](int i) const { return at[i]; }
};

// Two bf16 in one register, `low` in the lower half.
__device__ inline uint32_t pack_bf16x2(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ inline float2 unpack_bf16x2(uint32_t pair) {
  return __bfloat1622float2(reinterpret_cast<__nv_bfloat162&>(pair));
}
__device__ inline float2 load_bf16x2(const bf16* from) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(from));
}
__device__ inline void store_bf16x2(bf16* to, float low, float high) {
  *reinterpret_cast<uint32_t*>(to) = pack_bf16x2(low, high);
}

// Streaming access to four numbers, 16-byte aligned. The store is marked evict-first
// (st.global.cs), because decode states are not read again soon.
__device__ inline Vec4 load_float4(const float* from) {
  const float4 x = *reinterpret_cast<const float4*>(from);
  return {x.x, x.y, x.z, x.w};
}
__device__ inline void store_streaming(float* to, Vec4 x) {
  __stcs(reinterpret_cast<float4*>(to), make_float4(x[0], x[1], x[2], x[3]));
}

// Number i of a row of f32 or bf16. There is no branch on the dtype, so that consecutive loads are
// in flight together: a bf16 is the upper half of a float.
__device__ inline float load_scalar(const void* row, DType dtype, int64_t i) {
  const bool half = dtype == DType::bf16;
  const char* at = static_cast<const char*>(row) + i * (half ? 2 : 4);
  const uint32_t low = *reinterpret_cast<const uint16_t*>(at);
  const uint32_t high = *reinterpret_cast<const uint16_t*>(at + (half ? 0 : 2));
  return __uint_as_float(high << 16 | (half ? 0 : low));
}

// kCount numbers of such a row. The address is aligned to 16 bytes, or to 8 if 8 does
// not divide kCount.
template <int kCount>
__device__ inline void load_vec(float (&x)[kCount], const void* row, DType dtype, int64_t first) {
  static_assert(kCount % 4 == 0);
  constexpr int kWords = kCount % 8 == 0 ? 4 : 2;  // words per load
  const bool half = dtype == DType::bf16;
  const auto* at = reinterpret_cast<const Vec<uint32_t, kWords>*>(static_cast<const char*>(row) +
                                                                  first * (half ? 2 : 4));
  Vec<uint32_t, kWords> words[kCount / kWords] = {};
#pragma unroll
  for (int i = 0; i < kCount / kWords; ++i)
    if (i < kCount / kWords / 2 || !half) words[i] = at[i];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint32_t pair = words[i / 2 / kWords].at[i / 2 % kWords];
    const uint32_t whole = words[i / kWords].at[i % kWords];
    x[i] = __uint_as_float(!half ? whole : i % 2 ? pair & 0xffff0000u : pair << 16);
  }
}

}  // namespace assay::ops::cuda
