// The choice of chunks: scores come out of the tensor cores a tile of queries × 64 columns at a time, and only the best
// one of each query is kept. The next best (top_k > 1) is found by going through all of them again.
#include "ops/top1_chunk/cuda_passes.cuh"

namespace assay::ops::cuda::top1 {
namespace {

constexpr int kWarps = 4, kRows = 32, kTile = kWarps * kRows, kColumns = 64;  // a warp's queries, a block's, its step

// mean_high + mean_low = the mean of a chunk's keys; key_norm: the longest of them. A block a chunk.
template <int D>
__global__ void __launch_bounds__(256) mean_kernel(Top1ChunkForward p, SelectScratch s) {
  constexpr int kVectors = D / 8, kStreams = 256 / kVectors;
  __shared__ float sums[kStreams][D];
  __shared__ float longest;
  const int chunk = int(p.chunk_size), vector = threadIdx.x % kVectors, stream = threadIdx.x / kVectors;
  const int b = blockIdx.y / int(p.kv_heads), kv = blockIdx.y % int(p.kv_heads);
  const int64_t at = blockIdx.y * int64_t{gridDim.x} + blockIdx.x, first = blockIdx.x * int64_t{chunk};
  if (first + chunk > p.time) return;  // a partial chunk is nobody's candidate
  float sum[8] = {};
  if (threadIdx.x == 0) longest = 0;
  __syncthreads();
  for (int i = stream; i < chunk && stream < kStreams; i += kStreams) {
    const uint4 x = *reinterpret_cast<const uint4*>(row_of<D>(p.k, b, first + i, kv) + vector * 8);
    const uint32_t xs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 u = unpack(xs[e]);
      sum[2 * e] += u.x, sum[2 * e + 1] += u.y;
    }
  }
  if (stream < kStreams)
    for (int e = 0; e < 8; ++e) sums[stream][vector * 8 + e] = sum[e];
  for (int i = threadIdx.x; i < chunk; i += 256) {
    float square = 0;
    for (int j = 0; j < kVectors; ++j) {
      const uint4 x = *reinterpret_cast<const uint4*>(row_of<D>(p.k, b, first + i, kv) + j * 8);
      const uint32_t xs[4] = {x.x, x.y, x.z, x.w};
      for (int e = 0; e < 4; ++e) {
        const float2 u = unpack(xs[e]);
        square += u.x * u.x + u.y * u.y;
      }
    }
    const float norm = isnan(square) ? INFINITY : sqrtf(square) * 1.001f;
    atomicMax(reinterpret_cast<int*>(&longest), __float_as_int(norm));  // of numbers ≥ 0: the order does not matter
  }
  __syncthreads();
  if (threadIdx.x == 0) s.key_norm[at] = longest;
  if (threadIdx.x >= D) return;
  float mean = 0;
  for (int i = 0; i < kStreams; ++i) mean += sums[i][threadIdx.x];
  mean /= float(chunk);
  const bf16 high = __float2bfloat16(mean);
  s.mean_high[at * D + threadIdx.x] = high;
  s.mean_low[at * D + threadIdx.x] = __float2bfloat16(mean - __bfloat162float(high));
}

// The best candidate so far of a lane's four rows. Candidates are offered in rising order; the first of equals stays.
// After rank 0 only those count that come behind (score, chunk) of the rank before.
struct Best {
  float score[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, previous[4];
  int chunk[4], previous_chunk[4];
  template <bool kFirst>
  __device__ void offer(int i, float x, int c) {
    bool better = x > score[i];
    if (!kFirst) better = better && (x < previous[i] || (x == previous[i] && c > previous_chunk[i]));
    if (better) score[i] = x, chunk[i] = c;
  }
  // The best of the quad's lanes, in all of them.
  __device__ void join_quad() {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int step = 1; step <= 2; step *= 2) {
        const float x = __shfl_xor_sync(~0u, score[i], step);
        const int c = __shfl_xor_sync(~0u, chunk[i], step);
        if (x > score[i] || (x == score[i] && c < chunk[i])) score[i] = x, chunk[i] = c;
      }
  }
};

// A block's queries: 128 of one head, heaviest blocks first.
struct Queries {
  int b, h, kv, first, count, candidates;  // candidates: chunks before the last query's own
  int64_t rows;                            // [B, H, T] of the first
  __device__ explicit Queries(const Top1ChunkForward& p) {
    const int heads = int(p.heads), time = int(p.time);
    b = blockIdx.x % (int(p.batch) * heads) / heads, h = blockIdx.x % heads, kv = h / (heads / int(p.kv_heads));
    const int tiles = (time + kTile - 1) / kTile, tile = tiles - 1 - int(blockIdx.x / (p.batch * heads));
    first = tile * kTile, count = min(kTile, time - first);
    candidates = (first + count - 1) / int(p.chunk_size);
    rows = (int64_t{b} * heads + h) * time + first;
  }
  // Row i of the lane, 0 … 3.
  __device__ int row(int i) const { return threadIdx.x / 32 * kRows + i / 2 * 16 + i % 2 * 8 + threadIdx.x % 32 / 4; }
};

__device__ Best begin_best(const Top1ChunkForward& p, const Queries& mine, const float* previous, int rank) {
  Best best;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = min(mine.row(i), mine.count - 1), own = (mine.first + row) / int(p.chunk_size);
    best.chunk[i] = rank < own ? rank : -1;  // for want of a better one: scores may be NaN or −inf
    if (rank > 0) {
      best.previous[i] = previous[mine.rows + row];
      best.previous_chunk[i] = int(p.selected[(mine.rows + row) * p.top_k + rank - 1]);
    }
  }
  return best;
}

__device__ void end_best(const Top1ChunkForward& p, const Queries& mine, Best best, float* previous, int rank) {
  best.join_quad();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = mine.row(i);
    if (threadIdx.x % 4 || row >= mine.count) continue;
    p.selected[(mine.rows + row) * p.top_k + rank] = best.chunk[i];
    if (p.top_k > 1) previous[mine.rows + row] = best.score[i];
  }
}

// The block's queries into registers, by way of `tile`.
template <int D>
__device__ void load_queries(uint32_t (&q)[2][D / 16][4], Tile<D> tile, const Top1ChunkForward& p,
                             const Queries& mine) {
  copy_rows<D>(tile, p.q, mine.b, mine.first, mine.h, mine.count, kTile);
  commit_copies(), wait_copies<0>();
  __syncthreads();
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int kk = 0; kk < D / 16; ++kk) load_a(q[m][kk], tile, threadIdx.x / 32 * kRows + m * 16, kk * 2);
}

// s += q · the tile's rows
template <int D>
__device__ void score(float (&s)[2][kColumns / 8][4], const uint32_t (&q)[2][D / 16][4], Tile<D> rows) {
#pragma unroll
  for (int kk = 0; kk < D / 16; ++kk)
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      uint32_t b[4];
      load_b(b, rows, n * 16, kk * 2);
#pragma unroll
      for (int m = 0; m < 2; ++m) multiply_add(s[m][2 * n], s[m][2 * n + 1], q[m][kk], b);
    }
}

template <int D, bool kFirst>
__global__ void __launch_bounds__(kWarps * 32)
    approx_kernel(Top1ChunkForward p, SelectScratch scratch, int chunks, int rank) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Queries mine(p);
  bf16* const base = reinterpret_cast<bf16*>(memory);
  uint32_t q[2][D / 16][4];
  load_queries<D>(q, {base}, p, mine);
  __syncthreads();  // its memory is the means' first stage
  const int64_t means = (int64_t{mine.b} * p.kv_heads + mine.kv) * chunks;
  auto stage_of = [&](int stage, int low) { return Tile<D>{base + (2 * stage + low) * kColumns * D}; };
  auto fetch = [&](int first, int stage) {
    for (int i = threadIdx.x; i < kColumns * (D / 8) && first < mine.candidates; i += kWarps * 32) {
      const int row = i / (D / 8), vector = i % (D / 8);
      const bool wanted = first + row < mine.candidates;
      const int64_t from = (means + (wanted ? first + row : 0)) * D + vector * 8;
      copy_async(stage_of(stage, 0).at(row, vector), scratch.mean_high + from, wanted);
      copy_async(stage_of(stage, 1).at(row, vector), scratch.mean_low + from, wanted);
    }
    commit_copies();
  };
  Best best = begin_best(p, mine, scratch.previous, rank);
  const int common = mine.first / int(p.chunk_size);  // these are every query's candidates
  int own[4];
  for (int i = 0; i < 4; ++i) own[i] = (mine.first + mine.row(i)) / int(p.chunk_size);
  fetch(0, 0);
  for (int first = 0, stage = 0; first < mine.candidates; first += kColumns, stage ^= 1) {
    fetch(first + kColumns, stage ^ 1);
    wait_copies<1>();
    __syncthreads();
    float s[2][kColumns / 8][4] = {};
    score<D>(s, q, stage_of(stage, 0));
    score<D>(s, q, stage_of(stage, 1));
    const int column = first + threadIdx.x % 4 * 2;
    const bool all = first + kColumns <= common;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int row = i / 4 * 2 + i % 4 / 2, c = column + n * 8 + i % 2;
        if (all || c < own[row]) best.offer<kFirst>(row, s[i / 4][n][i % 4], c);
      }
    __syncthreads();
  }
  end_best(p, mine, best, scratch.previous, rank);
}

// Σ exp2(scale · q·k) of a chunk's keys, for a lane's four rows and its own columns. Bounded: no score can overflow and
// no sum vanish, so that the maximum need not be known; else the sum is relative to 2^top.
template <bool kBounded>
struct ChunkSum {
  float sum[4] = {}, top[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  __device__ void add(const float (&s)[2][kColumns / 8][4], float scale, int limit) {
    const int column = threadIdx.x % 4 * 2;
    const bool all = limit >= kColumns;
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      auto at = [&](int n, int e) { return s[row / 2][n][row % 2 * 2 + e] * scale; };
      if (!kBounded) {
        float high = top[row];
#pragma unroll
        for (int i = 0; i < kColumns / 4; ++i)
          if (all || column + i / 2 * 8 + i % 2 < limit) high = fmaxf(high, at(i / 2, i % 2));
        sum[row] *= high == top[row] ? 1 : exp2_fast(top[row] - high), top[row] = high;
      }
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i)
        if (all || column + i / 2 * 8 + i % 2 < limit)
          sum[row] += exp2_fast(at(i / 2, i % 2) - (kBounded ? 0 : top[row]));
    }
  }
  // log₂ of the whole sum, in all lanes of the quad.
  __device__ float finish(int row) {
    float high = top[row], total = sum[row];
    if (!kBounded) {
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
      total *= high == top[row] ? 1 : exp2_fast(top[row] - high);
    }
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    return kBounded ? __log2f(total) : high + __log2f(total);
  }
};

constexpr float kBound = 100;  // of a score in base 2: 2^(100 + log₂ 256) is finite, 2^−100 a normal number

template <int D, bool kFirst, bool kBounded>
__device__ void exact(const Top1ChunkForward& p, const SelectScratch& scratch, const Queries& mine,
                      const uint32_t (&q)[2][D / 16][4], bf16* memory, int rank) {
  const int chunk = int(p.chunk_size), steps = (chunk + kColumns - 1) / kColumns, all_steps = mine.candidates * steps;
  auto stage_of = [&](int stage) { return Tile<D>{memory + stage * kColumns * D}; };
  auto fetch = [&](int step, int stage) {
    const int key = step % steps * kColumns;
    if (step < all_steps)
      copy_rows<D>(stage_of(stage), p.k, mine.b, int64_t{step / steps} * chunk + key, mine.kv,
                   min(kColumns, chunk - key), kColumns);
    commit_copies();
  };
  Best best = begin_best(p, mine, scratch.previous, rank);
  int own[4];
  for (int i = 0; i < 4; ++i) own[i] = (mine.first + mine.row(i)) / chunk;
  ChunkSum<kBounded> sum;
  fetch(0, 0);
  for (int step = 0; step < all_steps; ++step) {
    fetch(step + 1, (step + 1) % 2);
    wait_copies<1>();
    __syncthreads();
    float s[2][kColumns / 8][4] = {};
    score<D>(s, q, stage_of(step % 2));
    sum.add(s, float(p.scale) * kLog2e, chunk - step % steps * kColumns);
    if (step % steps == steps - 1) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = sum.finish(i);
        if (step / steps < own[i]) best.offer<kFirst>(i, x, step / steps);
      }
      sum = {};
    }
    __syncthreads();
  }
  end_best(p, mine, best, scratch.previous, rank);
}

// The largest |scale · q·k| in base 2 that the block can meet, by Cauchy and Schwarz.
template <int D>
__device__ float score_bound(const Top1ChunkForward& p, const SelectScratch& scratch, const Queries& mine, Tile<D> q,
                             int chunks) {
  float query = 0, key = 0;
  for (int j = 0; j < D; ++j) {
    const float x = __bfloat162float(q.at(threadIdx.x, j / 8)[j % 8]);
    query += x * x;
  }
  const float* norms = scratch.key_norm + (int64_t{mine.b} * p.kv_heads + mine.kv) * chunks;
  for (int c = threadIdx.x; c < mine.candidates; c += kTile) key = fmaxf(key, norms[c]);
  __shared__ float queries[kTile], keys[kTile];
  queries[threadIdx.x] = isnan(query) ? INFINITY : sqrtf(query) * 1.001f, keys[threadIdx.x] = key;
  __syncthreads();
  for (int i = 0; i < kTile; ++i) query = fmaxf(query, queries[i]), key = fmaxf(key, keys[i]);
  return fabsf(float(p.scale)) * kLog2e * query * key;
}

template <int D, bool kFirst>
__global__ void __launch_bounds__(kTile) exact_kernel(Top1ChunkForward p, SelectScratch scratch, int chunks, int rank) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Queries mine(p);
  bf16* const base = reinterpret_cast<bf16*>(memory);
  uint32_t q[2][D / 16][4];
  load_queries<D>(q, {base}, p, mine);
  const float bound = score_bound<D>(p, scratch, mine, {base}, chunks);
  __syncthreads();  // the memory of q is that of the keys from here on
  if (bound <= kBound) exact<D, kFirst, true>(p, scratch, mine, q, base, rank);
  else exact<D, kFirst, false>(p, scratch, mine, q, base, rank);
}

template <int D>
void select_blocks(const Top1ChunkForward& p, const SelectScratch& scratch, cudaStream_t stream) {
  const int chunks = int(ceil_div(p.time, p.chunk_size));
  mean_kernel<D><<<dim3(chunks, unsigned(p.batch * p.kv_heads)), 256, 0, stream>>>(p, scratch);
  const unsigned blocks = unsigned(ceil_div(p.time, kTile) * p.batch * p.heads);
  const bool approx = p.selection == Selection::approx;
  const size_t bytes = (approx ? 4 * kColumns : std::max(kTile, 2 * kColumns)) * D * sizeof(bf16);
  for (int rank = 0; rank < p.top_k; ++rank) {
    const auto kernel = approx ? (rank == 0 ? approx_kernel<D, true> : approx_kernel<D, false>)
                               : (rank == 0 ? exact_kernel<D, true> : exact_kernel<D, false>);
    launch_shared(kernel, blocks, kTile, bytes, stream, p, scratch, chunks, rank);
  }
}

}  // namespace

SelectScratch::SelectScratch(const Top1ChunkForward& p, Arena& arena) {
  const int64_t chunks = p.batch * p.kv_heads * ceil_div(p.time, p.chunk_size);
  mean_high = arena.take<bf16>(chunks * p.head_dim), mean_low = arena.take<bf16>(chunks * p.head_dim);
  key_norm = arena.take<float>(chunks);
  previous = p.top_k > 1 ? arena.take<float>(p.batch * p.heads * p.time) : nullptr;
}

void select_chunks(const Top1ChunkForward& p, const SelectScratch& scratch, cudaStream_t stream) {
  with_head_dim(p.head_dim, [&](auto d) { select_blocks<d()>(p, scratch, stream); });
  check_launch("top1_chunk: selection");
}

}  // namespace assay::ops::cuda::top1
