// Decode attention on CUDA. A block has 256 neighbouring keys of one row and head. A group of lanes
// has a key at a time, each lane eight of its numbers, and an online softmax of its own over every
// n-th key. The blocks of a row are combined by a second kernel, in their order.
//
//            keys →  0 … 255      256 … 511     512 … S − 1
//   row b, head h  [ block 0 ]   [ block 1 ]   [ block 2 + new token ]     part_kernel
//                        └──────────────┴──────────────┘                   combine_kernel
//
// Every key and value is read once per query head: 4 D bytes in bf16 for 4 D FLOPs, so the memory
// is the limit. A thread has eight loads of 16 bytes in flight.
#include <algorithm>
#include <bit>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/types.cuh"
#include "ops/decode_attention/kernel.h"

namespace assay::ops::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kKeys = 256;    // of a block
constexpr int kColumns = 8;   // numbers of a lane
constexpr int kUnroll = 4;    // keys of a group at a time
constexpr int kMaxRows = 64;  // of a launch: their caches are its parameters

struct Step {
  DecodeAttention args;
  DecodeCache caches[kMaxRows];
  int64_t first_row;
  int64_t splits;  // blocks of the longest row
  // [B, H, splits, D + 2]: D numbers Σ 2^(score − most) v, most, Σ 2^(score − most)
  float* parts;

  __device__ float* part(int64_t head, int64_t split) const {
    const int64_t row = first_row + blockIdx.z;
    return parts + ((row * args.heads + head) * splits + split) * (args.head_dim + 2);
  }
};

__device__ inline int64_t splits_of(int64_t length) { return (length + kKeys - 1) / kKeys; }

// Scores are in base 2.
struct Softmax {
  float most = -INFINITY, sum = 0, out[kColumns] = {};

  template <class T, int N>
  __device__ void add(const float (&scores)[N], const Vec<T, kColumns> (&values)[N]) {
    float top = most;
#pragma unroll
    for (int n = 0; n < N; ++n) top = fmaxf(top, scores[n]);
    const float origin = top == -INFINITY ? 0 : top;  // −∞ − −∞ is not a number
    const float factor = exp2f(most - origin);
    most = top;
    sum *= factor;
#pragma unroll
    for (float& x : out) x *= factor;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float weight = exp2f(scores[n] - origin);
      sum += weight;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) out[i] += weight * to_compute(values[n][i]);
    }
  }
};

template <class T>
__device__ Vec<T, kColumns> load_or_zero(const T* from, bool exists) {
  Vec<T, kColumns> x;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) x[i] = from_compute<T>(0.f);
  if (exists) x = *reinterpret_cast<const Vec<T, kColumns>*>(from);
  return x;
}

// The query times scale · log2(e), so that exp2 gives the weights.
template <class T, int kLanes>
__device__ float score(const float (&query)[kColumns], const Vec<T, kColumns>& key) {
  float dot = 0;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) dot += query[i] * to_compute(key[i]);
  return group_reduce<kLanes>(dot, Plus{});
}

// kLanes · 8 ≥ D. Grid: splits, heads, rows.
template <class T, int kLanes>
__global__ void __launch_bounds__(kThreads) part_kernel(const __grid_constant__ Step p) {
  constexpr int kGroups = kThreads / kLanes;
  __shared__ float group_out[kGroups][kLanes * kColumns];
  __shared__ float group_most[kGroups], group_sum[kGroups];
  const DecodeCache& cache = p.caches[blockIdx.z];
  const int64_t begin = int64_t(blockIdx.x) * kKeys, last = cache.length - 1;
  if (begin > last) return;
  const int64_t D = p.args.head_dim, row = p.first_row + blockIdx.z, head = blockIdx.y;
  const int64_t per_kv = p.args.heads / p.args.kv_heads, kv = head / per_kv;
  const int group = threadIdx.x / kLanes, column = threadIdx.x % kLanes * kColumns;
  const bool inside = column < D;
  const float slope = p.args.alibi_slopes ? p.args.alibi_slopes[head] * kLog2e : 0.f;
  const auto of_token = [&](const void* x, int64_t stride, int64_t h) {
    return static_cast<const T*>(x) + row * stride + h * D + column;
  };
  const Vec<T, kColumns> q = load_or_zero(of_token(p.args.q, p.args.q_stride, head), inside);
  float query[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) query[i] = to_compute(q[i]) * float(p.args.scale) * kLog2e;

  Softmax softmax;
  T* const keys = static_cast<T*>(cache.k) + kv * D + column;
  T* const values = static_cast<T*>(cache.v) + kv * D + column;
  const int64_t stride = p.args.kv_heads * D, end = min(begin + kKeys, last);
  for (int64_t base = begin; base < end; base += kGroups * kUnroll) {
    Vec<T, kColumns> k[kUnroll], v[kUnroll];
    float scores[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t j = base + u * kGroups + group;
      k[u] = load_or_zero(keys + j * stride, inside && j < end);
      v[u] = load_or_zero(values + j * stride, inside && j < end);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t j = base + u * kGroups + group;
      const float x = score<T, kLanes>(query, k[u]) - slope * float(last - j);
      scores[u] = j < end ? x : -INFINITY;
    }
    softmax.add(scores, v);
  }
  if (last < begin + kKeys) {  // the new token is not read from the cache, which gets it here
    const Vec<T, kColumns> k = load_or_zero(of_token(p.args.k, p.args.k_stride, kv), inside);
    const Vec<T, kColumns> v[1] = {load_or_zero(of_token(p.args.v, p.args.v_stride, kv), inside)};
    const float x = score<T, kLanes>(query, k);
    const float scores[1] = {group == 0 ? x : -INFINITY};
    softmax.add(scores, v);
    if (group == 0 && inside && head % per_kv == 0) {
      *reinterpret_cast<Vec<T, kColumns>*>(keys + last * stride) = k;
      *reinterpret_cast<Vec<T, kColumns>*>(values + last * stride) = v[0];
    }
  }

#pragma unroll
  for (int i = 0; i < kColumns; ++i) group_out[group][column + i] = softmax.out[i];
  if (column == 0) {
    group_most[group] = softmax.most;
    group_sum[group] = softmax.sum;
  }
  __syncthreads();
  float most = -INFINITY, sum = 0;
  for (int g = 0; g < kGroups; ++g) most = fmaxf(most, group_most[g]);
  float* const part = p.part(head, blockIdx.x);
  for (int64_t d = threadIdx.x; d < D; d += kThreads) {
    float out = 0;
    for (int g = 0; g < kGroups; ++g) out += exp2f(group_most[g] - most) * group_out[g][d];
    part[d] = out;
  }
  if (threadIdx.x > 0) return;
  for (int g = 0; g < kGroups; ++g) sum += exp2f(group_most[g] - most) * group_sum[g];
  part[D] = most;
  part[D + 1] = sum;
}

// Grid: 1, heads, rows.
template <class T>
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ Step p) {
  const int64_t D = p.args.head_dim, row = p.first_row + blockIdx.z, head = blockIdx.y;
  const int64_t splits = splits_of(p.caches[blockIdx.z].length);
  float most = -INFINITY, sum = 0;
  for (int64_t s = 0; s < splits; ++s) most = fmaxf(most, p.part(head, s)[D]);
  for (int64_t s = 0; s < splits; ++s)
    sum += exp2f(p.part(head, s)[D] - most) * p.part(head, s)[D + 1];
  T* const to = static_cast<T*>(p.args.out) + (row * p.args.heads + head) * D;
  for (int64_t d = threadIdx.x; d < D; d += kThreads) {
    float out = 0;
    for (int64_t s = 0; s < splits; ++s)
      out += exp2f(p.part(head, s)[D] - most) * p.part(head, s)[d];
    to[d] = from_compute<T>(splits == 0 ? 0.f : out / sum);
  }
}

int64_t most_splits(const DecodeAttention& args) {
  int64_t longest = 0;
  for (int64_t b = 0; b < args.rows; ++b) longest = std::max(longest, args.caches[b].length);
  return ceil_div(longest, kKeys);
}

template <class T>
void launch(const Step& step, unsigned rows, Stream stream) {
  const auto heads = unsigned(step.args.heads);
  const auto lanes = std::max(std::bit_ceil(unsigned(step.args.head_dim / kColumns)), 4u);
  if (step.splits > 0)  // else no row is used
    with_constant<4, 8, 16, 32>(int(lanes), [&](auto lanes) {
      launch_kernel(part_kernel<T, lanes()>, {unsigned(step.splits), heads, rows}, kThreads, 0,
                    stream, step);
    });
  launch_kernel(combine_kernel<T>, {1, heads, rows}, kThreads, 0, stream, step);
}

}  // namespace

size_t workspace_bytes(const DecodeAttention& args) {
  const int64_t parts = args.rows * args.heads * most_splits(args);
  return size_t(parts * (args.head_dim + 2)) * sizeof(float);
}

void decode_attention(const DecodeAttention& args, void* workspace, Stream stream) {
  Step step{.args = args, .splits = most_splits(args), .parts = static_cast<float*>(workspace)};
  for (int64_t first = 0; first < args.rows; first += kMaxRows) {
    const int64_t rows = std::min<int64_t>(kMaxRows, args.rows - first);
    step.first_row = first;
    std::copy_n(args.caches + first, rows, step.caches);
    if (args.dtype == DType::bf16) launch<bf16>(step, unsigned(rows), stream);
    else launch<float>(step, unsigned(rows), stream);
  }
}

}  // namespace assay::ops::cuda
