// Rotary queries, keys and values on CUDA: a few lanes per head, 16 bytes of each half per lane.
#include "ops/cuda/math.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/rotary_qkv/kernel.h"

namespace assay::ops::cuda {
namespace {

constexpr int kThreads = 256;

// Where head `head` of position `position` begins in q, k or v.
template <class T>
__device__ T* alone(const RotaryQkv& p, int64_t position, int64_t head) {
  if (head < p.heads) return static_cast<T*>(p.q) + (position * p.heads + head) * p.head_dim;
  head -= p.heads;
  return static_cast<T*>(head < p.kv_heads ? p.k : p.v) +
         (position * p.kv_heads + head % p.kv_heads) * p.head_dim;
}

// Both halves' numbers of a column, turned by the angle of the position, or back.
template <class T, int kWidth>
struct Turned {
  using R = Real<T>;
  R first[kWidth], second[kWidth];
  __device__ Turned(const RotaryQkv& p, const T* from, int64_t angle, int64_t half, bool turn) {
    const auto a = *reinterpret_cast<const Vec<T, kWidth>*>(from),
               b = *reinterpret_cast<const Vec<T, kWidth>*>(from + half);
    const R *cos = static_cast<const R*>(p.cos) + angle,
            *sin = static_cast<const R*>(p.sin) + angle;
    for (int k = 0; k < kWidth; ++k) {
      const R x = to_compute(a.at[k]), y = to_compute(b.at[k]), c = turn ? cos[k] : R(1),
              s = turn ? p.backward ? -sin[k] : sin[k] : R(0);
      first[k] = x * c - y * s;
      second[k] = y * c + x * s;
    }
  }
};

// One group of lanes per head; with QK-norm it is read twice, the second time from the L1 cache.
// With x the head, g its gradient turned back, n = √(Σ x² + ε) and s the scale: dx = s/n (g − x
// (x·g)/n²), ds = (x·g)/n.
template <class T, int kWidth, bool kNorm>
__global__ void __launch_bounds__(kThreads) rotary_kernel(RotaryQkv p, int64_t tasks, int group) {
  griddep_launch_dependents();
  griddep_wait();
  using R = Real<T>;
  using Packed = Vec<T, kWidth>;
  const int64_t half = p.head_dim / 2, all = p.packed_heads(),
                wanted = (blockIdx.x * int64_t{kThreads} + threadIdx.x) / group;
  const int64_t task = min(wanted, tasks - 1), head = task % all, position = task / all,
                angles = position % p.time * half;
  const int lane = threadIdx.x % group;
  T *packed = static_cast<T*>(p.qkv) + position * p.qkv_stride + head * p.head_dim,
    *single = alone<T>(p, position, head);
  const T *from = p.backward ? single : packed,
          *normed = p.backward ? static_cast<const T*>(p.normed) + task * p.head_dim : packed;
  T* to = p.backward ? packed : single;
  const bool turn = head < p.heads + p.kv_heads;
  R scale = 1, along = 0;  // out = scale (turned − along x)
  if (kNorm) {
    R squares = 0, product = 0;
    for (int64_t i = lane * kWidth; turn && i < half; i += group * kWidth) {
      const Packed a = *reinterpret_cast<const Packed*>(normed + i),
                   b = *reinterpret_cast<const Packed*>(normed + half + i);
      for (int k = 0; k < kWidth; ++k)
        squares +=
            to_compute(a.at[k]) * to_compute(a.at[k]) + to_compute(b.at[k]) * to_compute(b.at[k]);
      if (!p.backward) continue;
      const Turned<T, kWidth> g(p, from + i, angles + i, half, true);
      for (int k = 0; k < kWidth; ++k)
        product += to_compute(a.at[k]) * g.first[k] + to_compute(b.at[k]) * g.second[k];
    }
    squares = group_sum(squares, group);
    product = group_sum(product, group);
    if (turn) {
      const R inverse = rsqrt(squares + R(kUnitLengthEps));
      scale = inverse * (head < p.heads ? static_cast<const R*>(p.scale)[head] : R(1));
      along = product * inverse * inverse;
      if (p.backward && head < p.heads && lane == 0)
        static_cast<R*>(p.dscale)[position * p.heads + head] = product * inverse;
    }
  }
  if (wanted >= tasks) return;
  for (int64_t i = lane * kWidth; i < half; i += group * kWidth) {
    Turned<T, kWidth> out(p, from + i, angles + i, half, turn);
    Packed a, b;
    if (kNorm && p.backward && turn) {
      a = *reinterpret_cast<const Packed*>(normed + i);
      b = *reinterpret_cast<const Packed*>(normed + half + i);
      for (int k = 0; k < kWidth; ++k) {
        out.first[k] -= along * to_compute(a.at[k]);
        out.second[k] -= along * to_compute(b.at[k]);
      }
    }
    for (int k = 0; k < kWidth; ++k) {
      a.at[k] = from_compute<T>(out.first[k] * scale);
      b.at[k] = from_compute<T>(out.second[k] * scale);
    }
    *reinterpret_cast<Packed*>(to + i) = a;
    *reinterpret_cast<Packed*>(to + half + i) = b;
  }
}

}  // namespace

void rotary_qkv(const RotaryQkv& p, Stream stream) {
  const int64_t half = p.head_dim / 2, tasks = p.batch * p.time * p.packed_heads();
  // a stride that is a multiple of half a head keeps the alignment
  with_vectors(p.dtype, half, {p.qkv, p.q, p.k, p.v, p.normed}, [&]<class T>(T, auto width) {
    int group = 1;
    while (group < half / width() && group < 32) group *= 2;
    const auto kernel =
        p.scale ? rotary_kernel<T, width(), true> : rotary_kernel<T, width(), false>;
    launch_pdl(kernel, unsigned(ceil_div(tasks * group, kThreads)), kThreads, 0, stream, p, tasks,
               group);
  });
}

}  // namespace assay::ops::cuda
