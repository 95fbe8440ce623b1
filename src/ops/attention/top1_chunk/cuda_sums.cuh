#pragma once
// Sums of exponentials over a chunk's keys, of scores that lie as products leave them.
#include "ops/cuda/reduce.cuh"

namespace assay::ops::cuda::top1 {

// 2^(s · scale), at most 100 in size, without the special-function unit, which is what the exact
// choice waits for:
// to 7.5e-5 of itself (minimax on [−½, ½]).
__device__ inline float exp2_by_polynomial(float s, float scale) {
  // 1.5 · 2^23: adding it rounds to an integer, which its low bits hold
  constexpr float kRound = 12582912;
  constexpr float kC0 = 0.99992807f;
  constexpr float kC1 = 0.69326099f;
  constexpr float kC2 = 0.24261112f;
  constexpr float kC3 = 0.05517167f;
  const float whole = fmaf(s, scale, kRound);
  const float part = fmaf(s, scale, kRound - whole);
  const float power = fmaf(fmaf(fmaf(kC3, part, kC2), part, kC1), part, kC0);
  return __int_as_float(__float_as_int(power) + (__float_as_int(whole) << 23));
}

// Σ exp2(scale · q·k) of a chunk's keys, for a lane's two rows and its own columns. Bounded: no
// score can overflow and no sum vanish, so that the maximum need not be known; else the sum is
// relative to 2^top.
template <bool kBounded>
struct ChunkSum {
  static constexpr int kPolynomials = 3;  // exponentials in 32 by polynomial, if bounded
  float sum[2][2] = {};
  float top[2] = {-INFINITY, -INFINITY};
  // Bounded: a tile all of whose columns count.
  template <int N>
  __device__ void add(const float (&s)[N][4], float scale) {
#pragma unroll
    for (int i = 0; i < 4 * N; ++i) {
      const float x = s[i / 4][i % 4];
      sum[i % 4 / 2][i % 2] += i * kPolynomials % 32 < kPolynomials ? exp2_by_polynomial(x, scale)
                                                                    : ex2_approx(x * scale);
    }
  }
  // Not bounded: the tile's columns [0, limit) count.
  template <int N>
  __device__ void add(const float (&s)[N][4], float scale, int limit) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      auto score = [&](int i) { return s[i / 2][row * 2 + i % 2] * scale; };
      auto counts = [&](int i) { return column + i / 2 * 8 + i % 2 < limit; };
      float high = top[row];
#pragma unroll
      for (int i = 0; i < 2 * N; ++i) high = counts(i) ? fmaxf(high, score(i)) : high;
      sum[row][0] *= high == top[row] ? 1 : ex2_approx(top[row] - high);
      top[row] = high;
#pragma unroll
      for (int i = 0; i < 2 * N; ++i)
        sum[row][0] += counts(i) ? ex2_approx(score(i) - top[row]) : 0;
    }
  }
  // The score of the chunk: the whole sum or, if not bounded, its log₂. Even lanes return that of
  // row 0, odd lanes that of row 1.
  __device__ float finish() const {
    float total[2];
    float high[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      total[i] = sum[i][0] + sum[i][1];
      high[i] = top[i];
      if (kBounded) continue;
      high[i] = quad_max(high[i]);
      total[i] *= high[i] == top[i] ? 1 : ex2_approx(top[i] - high[i]);
    }
    const bool odd = threadIdx.x % 2;
    float mine = odd ? total[1] : total[0];
    mine += __shfl_xor_sync(~0u, odd ? total[0] : total[1], 1);
    mine += __shfl_xor_sync(~0u, mine, 2);
    return kBounded ? mine : (odd ? high[1] : high[0]) + __log2f(mine);
  }
};

}  // namespace assay::ops::cuda::top1
