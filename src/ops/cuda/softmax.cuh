#pragma once
// Online softmax over C fragments, in base 2.
#include "ops/cuda/fragment.cuh"
#include "ops/cuda/reduce.cuh"

namespace assay::ops::cuda {

// A lane's two rows, lane / 4 and + 8: the largest score so far and the sum of 2^(score − row_max).
// row_sum has the lane's own columns only, until quad_sum() adds the others.
struct OnlineSoftmax {
  float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0, 0};

  // Scores become 2^(score − row_max), and earlier outputs are rescaled to the new row_max.
  template <int N, int M>
  __device__ void update(float (&scores)[N][4], float (&out)[M][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float top = row_max[i];
#pragma unroll
      for (int n = 0; n < N; ++n) top = fmaxf(top, fmaxf(scores[n][2 * i], scores[n][2 * i + 1]));
      top = quad_max(top);
      const float factor = ex2_approx(row_max[i] - top);
      row_max[i] = top;
      row_sum[i] *= factor;
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 2 * i; e < 2 * i + 2; ++e) {
          scores[n][e] = ex2_approx(scores[n][e] - top);
          row_sum[i] += scores[n][e];
        }
#pragma unroll
      for (int n = 0; n < M; ++n) {
        out[n][2 * i] *= factor;
        out[n][2 * i + 1] *= factor;
      }
    }
  }
};

}  // namespace assay::ops::cuda
