// A few steps, one after another, as decoding takes them. A block has a head's state; a thread one of its columns, of
// every so manieth row, so that neighbours are neighbours in memory whatever the number of columns.
#include "ops/cuda_steps.cuh"
#include "ops/taylor_exp/kernel.h"

namespace assay::ops::cuda::taylor {
namespace {

constexpr int kMaxColumns = kMaxTaylorValue + 1,
              kMaxFeatures = 1 + kMaxTaylorKey + kMaxTaylorKey * (kMaxTaylorKey + 1) / 2;
constexpr int kThreads = 320, kPiece = 10;  // wanted in a block; rows that a thread reads at once

__device__ inline float number(const Heads& x, DType dtype, const TaylorSteps& p, int64_t t, int64_t width, int64_t i) {
  const int64_t b = blockIdx.x / p.heads, h = blockIdx.x % p.heads;
  return cuda::number(x.rows.data, dtype,
                      b * x.rows.batch_stride + t * x.rows.time_stride + h / (p.heads / x.heads) * width + i);
}

// Feature f of the query, with its weight, and of the key, from their numbers.
__device__ inline void features(const float* q, const float* k, int K, float scale, int f, float& query, float& key) {
  if (f <= K) {
    query = f == 0 ? 1.f : scale * q[f - 1], key = f == 0 ? 1.f : k[f - 1];
    return;
  }
  int i = 0, j = f - 1 - K;
  for (; j >= K - i; ++i) j -= K - i;
  j += i;
  query = (i == j ? 0.5f : 1.f) * scale * scale * q[i] * q[j], key = k[i] * k[j];
}

__global__ void __launch_bounds__(kMaxColumns, 2) few_steps_kernel(TaylorSteps p, int groups) {
  __shared__ float q[kMaxTaylorKey], k[kMaxTaylorKey], query[kMaxFeatures], key[kMaxFeatures], parts[kMaxColumns];
  const int K = int(p.key_dim), columns = int(p.value_dim) + 1, F = 1 + K + K * (K + 1) / 2;
  const int column = threadIdx.x % columns, group = threadIdx.x / columns;
  const int64_t head = int64_t{blockIdx.x} * F * columns;
  const bool there = group < groups;
  const float* before = p.initial_state ? p.initial_state + head : nullptr;
  float* after = p.final_state + head;
  let_the_next_start();
  if (before && threadIdx.x == 0) prefetch(before, int64_t{F} * columns * sizeof(float));
  wait_for_those_before();
  for (int64_t t = 0; t < p.time; ++t) {
    if (threadIdx.x < K)
      q[threadIdx.x] = number(p.q, p.q_dtype, p, t, K, threadIdx.x),
      k[threadIdx.x] = number(p.k, p.k_dtype, p, t, K, threadIdx.x);
    const float value = there && column < p.value_dim ? number(p.v, p.v_dtype, p, t, p.value_dim, column) : 1.f;
    __syncthreads();
    for (int f = threadIdx.x; f < F; f += blockDim.x) features(q, k, K, p.scale, f, query[f], key[f]);
    __syncthreads();
    float sum = 0;
    for (int f0 = there ? group : F; f0 < F; f0 += groups * kPiece) {
      float S[kPiece] = {};
#pragma unroll
      for (int i = 0; i < kPiece; ++i)
        if (const int f = f0 + i * groups; before && f < F) S[i] = before[f * columns + column];
#pragma unroll
      for (int i = 0; i < kPiece; ++i)
        if (const int f = f0 + i * groups; f < F) {
          S[i] += key[f] * value, sum += query[f] * S[i];
          after[f * columns + column] = S[i];
        }
    }
    if (there) parts[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x < p.value_dim) {
      float out = 0, weights = 0;
      for (int g = 0; g < groups; ++g) out += parts[g * columns + column], weights += parts[(g + 1) * columns - 1];
      if (p.normalize) out /= weights + p.eps;
      const int64_t b = blockIdx.x / p.heads, h = blockIdx.x % p.heads;
      const int64_t at = ((b * p.time + t) * p.heads + h) * p.value_dim + column;
      if (p.q_dtype == DType::bf16) static_cast<bf16*>(p.out)[at] = stored<bf16>(out);
      else static_cast<float*>(p.out)[at] = out;
    }
    before = after;  // its own thread's
  }
}

}  // namespace
}  // namespace assay::ops::cuda::taylor

namespace assay::ops::cuda {
void few_steps(const TaylorSteps& p, Stream stream) {
  const int columns = int(p.value_dim) + 1, groups = std::max(1, taylor::kThreads / columns);
  const auto threads = unsigned(ceil_div(groups * columns, 32)) * 32;
  launch_early(taylor::few_steps_kernel, unsigned(p.batch * p.heads), threads, stream, p, groups);
  check_launch("taylor_exp_attention, a few steps");
}
}  // namespace assay::ops::cuda
