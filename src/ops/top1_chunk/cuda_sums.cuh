#pragma once
// Sums of exponentials over a chunk's keys, of scores that lie as products leave them: what the
// exact choice and the pairs of the shortlist share.
#include "ops/cuda/softmax.cuh"

namespace assay::ops::cuda::top1 {

// 2^(s · scale) with |s · scale| < 126, without the special-function unit, which is what the exact
// choice waits for: to 7.5e-5 of itself (minimax on [−½, ½]).
__device__ inline float exp2_by_polynomial(float s, float scale) {
  constexpr float kRound = 12582912;  // 1.5 · 2^23: adding it rounds; the low bits hold the integer
  const float whole = fmaf(s, scale, kRound), x = fmaf(s, scale, kRound - whole);
  const float power = fmaf(fmaf(fmaf(0.05517167f, x, 0.24261112f), x, 0.69326099f), x, 0.99992807f);
  return __int_as_float(__float_as_int(power) + (__float_as_int(whole) << 23));
}

// log₂ Σ exp2(scale · q·k) of a chunk's keys, for a lane's two rows. kPlain: without a maximum, so
// that finish() is the sum itself; a sum that fits() says that no score was too large, and what was
// flushed to 0 too small to count. Of 32 exponentials of a plain sum kPolynomials are polynomials,
// which are wrong if `largest`, the largest |q·k| of one, is too large.
template <bool kPlain, int kPolynomials = 0>
struct ChunkSum {
  OnlineSoftmax softmax;
  float sum[2][2] = {}, largest = 0;

  // Columns [0, limit) of a tile count; plain: all.
  template <int N>
  __device__ void add(float (&s)[N][4], float scale, int limit) {
    if constexpr (kPlain) {
      each_element(s, [&](float x, int n, int e) {
        const bool polynomial = (4 * n + e) * kPolynomials % 32 < kPolynomials;
        if (polynomial) largest = fmaxf(largest, fabsf(x));
        sum[e / 2][e % 2] += polynomial ? exp2_by_polynomial(x, scale) : ex2_approx(x * scale);
      });
    } else {
      const int column = threadIdx.x % 4 * 2;
      each_element(s, [&](float& x, int n, int e) {
        x = column + n * 8 + e % 2 < limit ? x * scale : -INFINITY;
      });
      float none[1][4] = {};
      softmax.update(s, none);
    }
  }
  // Even lanes: of row 0, odd lanes: of row 1.
  __device__ float finish() const {
    const bool odd = threadIdx.x % 2;
    float total[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) total[i] = kPlain ? sum[i][0] + sum[i][1] : softmax.row_sum[i];
    float mine = odd ? total[1] : total[0];
    mine += __shfl_xor_sync(~0u, odd ? total[0] : total[1], 1);
    mine += __shfl_xor_sync(~0u, mine, 2);
    return kPlain ? mine : (odd ? softmax.row_max[1] : softmax.row_max[0]) + __log2f(mine);
  }
  __device__ static bool fits(float finished) {
    return !kPlain || (finished > 0x1p-100f && finished < 0x1p100f);
  }
};

}  // namespace assay::ops::cuda::top1
