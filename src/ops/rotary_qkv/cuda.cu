// Rotary queries, keys and values on CUDA: one pass, 16 bytes of each half of a head a thread.
#include "ops/cuda.cuh"
#include "ops/rotary_qkv/kernel.h"

namespace assay::ops::cuda {
namespace {

constexpr int kThreads = 256;

// Where head `head` of position `position` begins in q, k or v.
template <class T>
__device__ T* alone(const RotaryQkv& p, int64_t position, int64_t head) {
  if (head < p.heads) return static_cast<T*>(p.q) + (position * p.heads + head) * p.head_dim;
  head -= p.heads;
  return static_cast<T*>(head < p.kv_heads ? p.k : p.v) + (position * p.kv_heads + head % p.kv_heads) * p.head_dim;
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) rotary_kernel(RotaryQkv p, int64_t tasks) {
  using R = Real<T>;
  using Packed = Pack<T, kWidth>;
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x, half = p.head_dim / 2, packs = half / kWidth;
  if (i >= tasks) return;
  const int64_t column = i % packs * kWidth, all = p.heads + 2 * p.kv_heads, head = i / packs % all, position = i / packs / all;
  T *packed = static_cast<T*>(p.qkv) + (position * all + head) * p.head_dim + column, *single = alone<T>(p, position, head) + column;
  T *from = p.backward ? single : packed, *to = p.backward ? packed : single;
  Packed a = *reinterpret_cast<Packed*>(from), b = *reinterpret_cast<Packed*>(from + half);
  if (head < p.heads + p.kv_heads) {
    const int64_t angle = position % p.time * half + column;
    const R *cos = static_cast<const R*>(p.cos) + angle, *sin = static_cast<const R*>(p.sin) + angle;
    for (int k = 0; k < kWidth; ++k) {
      const R x = real(a.at[k]), y = real(b.at[k]), c = cos[k], s = p.backward ? -sin[k] : sin[k];
      a.at[k] = stored<T>(x * c - y * s), b.at[k] = stored<T>(y * c + x * s);
    }
  }
  *reinterpret_cast<Packed*>(to) = a, *reinterpret_cast<Packed*>(to + half) = b;
}

template <class T, int kWidth>
void launch_rotary(const RotaryQkv& p, cudaStream_t stream) {
  const int64_t tasks = p.batch * p.time * (p.heads + 2 * p.kv_heads) * (p.head_dim / 2 / kWidth);
  rotary_kernel<T, kWidth><<<unsigned(ceil_div(tasks, kThreads)), kThreads, 0, stream>>>(p, tasks);
  check_launch("rotary_qkv");
}

}  // namespace

void rotary_qkv(const RotaryQkv& p, Stream stream) {
  with_type(p.dtype, [&](auto x) {
    using T = decltype(x);
    constexpr int kWidth = 16 / sizeof(T);
    bool wide = p.head_dim / 2 % kWidth == 0;
    for (const void* pointer : {p.qkv, p.q, p.k, p.v}) wide = wide && reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
    wide ? launch_rotary<T, kWidth>(p, static_cast<cudaStream_t>(stream)) : launch_rotary<T, 1>(p, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace assay::ops::cuda
