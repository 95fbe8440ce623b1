// A warp has 32 queries of one head in registers, and the block's four warps stream the keys, 64 at
// a time, through shared memory. Scores are products of mma.sync. A lane keeps the best position in
// its own columns, and the quad of lanes that has a row compares them at the end; chunks are
// compared as soon as they end.
#include <algorithm>

#include "ops/attention/passes/choice.h"
#include "ops/cuda/attention.cuh"
#include "ops/cuda/fragment.cuh"
#include "ops/cuda/reduce.cuh"

namespace assay::ops::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kQueries = 32 * kWarps;
constexpr int kPart = 64;               // keys in shared memory at a time, of which there are two
using Scores = float[2][kPart / 8][4];  // rows of two products of 16

// NaN is larger than every number.
__device__ bool is_larger(float x, float y) { return !(x <= y) && !isnan(y); }

// The row of a lane's scores, 0 … 3, that element e of product m belongs to.
__device__ constexpr int row_of(int m, int e) { return 2 * m + e / 2; }
template <class F>
__device__ void each_score(Scores& s, F&& f) {
#pragma unroll
  for (int m = 0; m < 2; ++m)
    each_element(s[m], [&](float& x, int n, int e) { f(x, row_of(m, e), n * 8 + e % 2); });
}
__device__ void largest(const Scores& s, float (&of_row)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto& product = s[i / 2];
    of_row[i] = product[0][i % 2 * 2];
#pragma unroll
    for (int n = 0; n < kPart / 8; ++n)
#pragma unroll
      for (int e = n == 0; e < 2; ++e) of_row[i] = max_nan(of_row[i], product[n][i % 2 * 2 + e]);
  }
}

// The largest score of each of a lane's four rows so far, and where it is.
struct BestOfRows {
  float top[4];
  int index[4];
  __device__ BestOfRows() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      top[i] = -INFINITY;
      index[i] = -1;
    }
  }
};

struct BestPosition : BestOfRows {
  static constexpr bool kChunks = false;
  // Scores of keys from `first` on, in the lane's own columns.
  __device__ void meet(Scores& s, int first) {
    float high[4];
    largest(s, high);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!is_larger(high[i], top[i])) continue;
      top[i] = high[i];
#pragma unroll
      for (int n = kPart / 8 - 1; n >= 0; --n)
#pragma unroll
        for (int e = 1; e >= 0; --e) {
          const float x = s[i / 2][n][i % 2 * 2 + e];
          if (x == high[i] || (isnan(x) && isnan(high[i])))
            index[i] = first + n * 8 + threadIdx.x % 4 * 2 + e;
        }
    }
  }
  __device__ void join_quad() {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        const float other = __shfl_xor_sync(~0u, top[i], step);
        const int position = __shfl_xor_sync(~0u, index[i], step);
        const bool equal = other == top[i] || (isnan(other) && isnan(top[i]));
        if (is_larger(other, top[i]) || (equal && uint32_t(position) < uint32_t(index[i]))) {
          top[i] = other;
          index[i] = position;
        }
      }
  }
};

struct BestChunk : BestOfRows {
  static constexpr bool kChunks = true;
  float high[4];  // the largest score of the chunk so far, of the lane's columns
  float sum[4];   // Σ 2^(scale (score − high))
  __device__ void begin() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      high[i] = -INFINITY;
      sum[i] = 0;
    }
  }
  // Scores of keys of the chunk; −∞ for those after it.
  __device__ void meet(Scores& s, float scale) {
    float part[4];
    float base[4];
    largest(s, part);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float before = high[i];
      high[i] = max_nan(before, part[i]);
      base[i] = base_of(high[i], scale);
      sum[i] *= before == -INFINITY ? 0 : ex2_approx(before * scale - base[i]);
    }
    each_score(s, [&](float x, int i, int) { sum[i] += ex2_approx(fmaf(x, scale, -base[i])); });
  }
  // By the whole warp; own: the chunks of the lane's queries.
  __device__ void end(int chunk, const int (&own)[4], float scale) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float all = butterfly<1, 4>(high[i], [](float x, float y) { return max_nan(x, y); });
      const float base = base_of(all, scale);
      const float share = high[i] == -INFINITY ? 0 : ex2_approx(high[i] * scale - base);
      const float score = base + __log2f(quad_sum(sum[i] * share));
      if (chunk >= own[i] || !(index[i] < 0 || is_larger(score, top[i]))) continue;
      top[i] = score;
      index[i] = chunk;
    }
  }
  __device__ static float base_of(float high, float scale) {
    return high == -INFINITY ? 0 : high * scale;
  }
};

template <int D, class Best>
__global__ void __launch_bounds__(32 * kWarps) choose_kernel(Top1Choice c, float scale) {
  using Rows = SwizzledTile<D>;
  __shared__ __align__(128) bf16 memory[2][kPart * D];  // first the queries, which take both
  static_assert(kQueries == 2 * kPart);
  const int64_t heads = c.batch * c.heads;
  const int64_t b = blockIdx.x % heads / c.heads;
  const int64_t h = blockIdx.x % heads % c.heads;
  const int64_t kv = h / (c.heads / c.kv_heads);
  const int64_t blocks = ceil_div(c.time, kQueries);
  // Later queries see more keys, so they begin first.
  const int64_t first = (blocks - 1 - blockIdx.x / heads) * kQueries;
  const int count = int(min(c.time - first, int64_t{kQueries}));
  const int last = int(c.past + first) + count - 1;
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x / 32 * 32;
  const auto query_of = [&](int i) { return row + i / 2 * 16 + i % 2 * 8 + lane / 4; };

  copy_rows(Rows{memory[0]}, c.q, b, first, h, count, kQueries);
  cp_async_wait_all();
  __syncthreads();
  uint32_t queries[2][D / 16][4];
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      load_a_mk(queries[m][k], Rows{memory[0]}, row + m * 16, k * 2);
#pragma unroll
      for (uint32_t& pair : queries[m][k]) {
        // With the sign of the scale, and zero where it is zero: the order of the scores.
        const float2 x = unpack_bf16x2(pair);
        const float sign = scale > 0 ? 1 : scale < 0 ? -1 : 0;
        pair = pack_bf16x2(x.x * sign, x.y * sign);
      }
    }
  __syncthreads();

  int position[4];
  int own[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    position[i] = int(c.past + first) + query_of(i);
    own[i] = Best::kChunks ? position[i] / int(c.chunk_size) : 0;
  }
  const int size = Best::kChunks ? int(c.chunk_size) : last + 1;
  const int chunks = Best::kChunks ? last / size : 1;
  const int parts = int(ceil_div(size, kPart));
  const auto begin_of = [&](int i) { return i / parts * size + i % parts * kPart; };
  const auto keys_of = [&](int i) { return min(size - i % parts * kPart, kPart); };
  const auto fetch = [&](int i) {
    if (i < chunks * parts)
      copy_rows(Rows{memory[i % 2]}, c.k, b, begin_of(i), kv, keys_of(i), kPart);
    cp_async_commit_group();
  };
  Best best;
  fetch(0);
  for (int i = 0; i < chunks * parts; ++i) {
    cp_async_wait_group<0>();
    __syncthreads();  // the part has arrived, and the one before it is no longer read
    fetch(i + 1);
    const Rows keys{memory[i % 2]};
    Scores s = {};
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
#pragma unroll
      for (int n = 0; n < kPart / 8; n += 2) {
        uint32_t operand[4];
        load_b_nk(operand, keys, n * 8, k * 2);
#pragma unroll
        for (int m = 0; m < 2; ++m) mma_m16n16k16(s[m][n], s[m][n + 1], queries[m][k], operand);
      }
    const int begin = begin_of(i);
    const int column = lane % 4 * 2;
    if constexpr (Best::kChunks) {
      if (i % parts == 0) best.begin();
      if (const int present = keys_of(i); present < kPart)
        each_score(s, [&](float& x, int, int n) {
          if (column + n >= present) x = -INFINITY;
        });
      best.meet(s, abs(scale));
      if (i % parts == parts - 1) best.end(i / parts, own, abs(scale));
    } else {
      if (begin + kPart > c.past + first)
        each_score(s, [&](float& x, int r, int n) {
          if (begin + column + n > position[r]) x = -INFINITY;
        });
      best.meet(s, begin);
    }
  }
  if constexpr (!Best::kChunks) best.join_quad();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (query_of(i) >= count) continue;
    const int64_t t = first + query_of(i);
    // Where all scores are −∞, the first position is chosen.
    const int index = Best::kChunks ? best.index[i] : max(best.index[i], 0);
    if (lane % 4 == 0) c.index[(b * c.heads + h) * c.time + t] = index;
    if constexpr (Best::kChunks) continue;
    const uint4* from = reinterpret_cast<const uint4*>(head_row<D>(c.v, b, index, kv));
    uint4* to = reinterpret_cast<uint4*>(head_row<D>(c.out, b, t, h));
#pragma unroll
    for (int n = lane % 4; n < D / 8; n += 4)
      to[n] = isnan(best.top[i]) ? make_uint4(~0u, ~0u, ~0u, ~0u) : from[n];
  }
}

}  // namespace

const char* why_unsupported(const Top1Choice& c) {
  if (const char* why_not = why_not_head_dim(c.head_dim)) return why_not;
  if (c.past + c.time > 1 << 30) return "takes up to 2^30 positions";
  return why_unaligned({c.q, c.k, c.v, c.out});
}

void choose(const Top1Choice& c, Stream stream) {
  check("the choice of Top-1 attention", why_unsupported(c));
  Top1Choice call = c;
  call.chunk_size = std::min(c.chunk_size, c.past + c.time);  // there is one chunk then, too
  const int64_t blocks = ceil_div(c.time, kQueries) * c.batch * c.heads;
  with_head_dim(c.head_dim, [&](auto d) {
    launch_kernel(
        c.chunk_size > 0 ? choose_kernel<d(), BestChunk> : choose_kernel<d(), BestPosition>,
        unsigned(blocks), 32 * kWarps, 0, stream, call, float(c.scale * kLog2eDouble));
  });
}

}  // namespace assay::ops::cuda
