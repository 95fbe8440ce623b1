#pragma once
// QueryTile scored against tiles of columns that the copy engine brings in, and sums of exponential
// scores: what the choice and the shortlist share.
#include "ops/cuda/attention.cuh"
#include "ops/cuda/pipeline.cuh"
#include "ops/cuda/softmax.cuh"
#include "ops/cuda/wgmma.cuh"
#include "ops/top1_chunk/cuda_passes.cuh"

namespace assay::ops::cuda::top1 {

constexpr int kRows = 64;       // queries of a warpgroup
constexpr int kTileRows = 128;  // of a tile of summaries

// A chunk has kParts rows: its mean and what rounding left of it, all first parts of a tile before
// all second ones; or its mean and axes, where rows of eight chunks make kParts n-tiles, so that a
// lane holds all of a chunk's products.
template <int kParts>
struct Layout {
  static constexpr int kChunks = kTileRows / kParts, kGroup = kParts == 2 ? kChunks : 8;
  __device__ static int row(int chunk, int part) {
    return (chunk % kChunks / kGroup * kParts + part) * kGroup + chunk % kGroup;
  }
};
inline int summary_parts(const Top1ChunkForward& p) {
  return p.selection == Selection::approx ? 2 : p.rank <= 3 ? 4 : 8;
}
inline int64_t summary_tiles(const Top1ChunkForward& p) {
  return ceil_div(ceil_div(p.time, p.chunk_size), kTileRows / summary_parts(p));
}
// Tiles of a key head after those of the one before. cuda_summaries.cu
bf16* take_summaries(const Top1ChunkForward& p, WorkspaceArena& arena);
void summarise(const Top1ChunkForward& p, bf16* columns, Stream stream);

// A block's queries, some of one head; heaviest blocks first.
struct QueryTile {
  int b, h, kv, first, count, chunk;
  int common, candidates;  // chunks before the first query's own, and before the last one's
  int64_t rows;            // [B, H, T] of the first
  int64_t kv_head;         // [B, Hk]
  __device__ QueryTile(const Top1ChunkForward& p, int tile_rows) {
    const int heads = int(p.heads), time = int(p.time);
    b = int(blockIdx.x % (p.batch * heads)) / heads;
    h = blockIdx.x % heads;
    kv = h / (heads / int(p.kv_heads));
    const int tiles = (time + tile_rows - 1) / tile_rows,
              tile = tiles - 1 - int(blockIdx.x / (p.batch * heads));
    first = tile * tile_rows;
    count = min(tile_rows, time - first);
    chunk = int(p.chunk_size);
    common = first / chunk;
    candidates = (first + count - 1) / chunk;
    kv_head = b * p.kv_heads + kv;
    rows = (int64_t{b} * heads + h) * time + first;
  }
  // Row i of the lane, 0 or 1.
  __device__ static int row(int i) { return threadIdx.x / 32 * 16 + i * 8 + threadIdx.x % 32 / 4; }
  __device__ int own(int i) const { return (first + min(row(i), count - 1)) / chunk; }
};

// Where things lie: the queries of each warpgroup, the tiles under way, their barriers.
template <int D, int kTile>
struct ScoreSmem {
  static constexpr int kStages = 3;
  bf16 *queries, *tiles;
  const bf16* from;  // what the tiles are copied from
  Pipeline<kStages> pipeline;
  static constexpr size_t bytes(int groups) {
    return (groups * kRows * D + kStages * kTile * D) * sizeof(bf16) +
           2 * Pipeline<kStages>::kBytes;
  }
  // Turn 1 is a second one of the same block: its barriers are others.
  __device__ ScoreSmem(int groups, const QueryTile& mine, const bf16* columns, int per_head,
                       int turn = 0)
      : from(columns + mine.kv_head * per_head * kTile * D) {
    extern __shared__ __align__(1024) unsigned char memory[];
    queries = reinterpret_cast<bf16*>(memory);
    tiles = queries + groups * kRows * D;
    pipeline.barriers =
        reinterpret_cast<uint64_t*>(tiles + kStages * kTile * D) + turn * 2 * kStages;
  }
  __device__ WgmmaTile<D, kRows> group() const { return {queries + threadIdx.x / 128 * kRows * D}; }
  __device__ bf16* tile(int stage) const { return tiles + stage * kTile * D; }
  __device__ void produce(int i) const {
    constexpr int kBytes = kTile * D * sizeof(bf16);
    const int stage = i % kStages;
    const Mbarrier full = pipeline.producer_acquire(stage, i / kStages % 2, kBytes);
    cp_async_bulk(tile(stage), from + int64_t{i} * kTile * D, kBytes, full);
  }
};

// Scores the warpgroup's queries against tile after tile, half a tile at a time: use(scores, tile
// number, first column). The tensor cores are one half ahead. A tile's column is the sum of
// kTile / kColumns rows of it.
template <int D, int kTile, int kColumns, class Use>
__device__ void score_tiles(const ScoreSmem<D, kTile>& shared, int count, Use&& use) {
  constexpr int kStages = ScoreSmem<D, kTile>::kStages, kHalf = kColumns / 2;
  using Tile = WgmmaTile<D, kTile>;
  const WgmmaDescriptor q = warp_uniform(shared.group().rows()),
                        tiles = warp_uniform(Tile{shared.tile(0)}.rows());
  auto issue = [&](float(&s)[kHalf / 8][4], int stage, int column) {
    const WgmmaDescriptor tile = tiles + stage * (kTile * D / 8);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < kTile / kColumns; ++part)
#pragma unroll
      for (int k = 0; k < D / 16; ++k)
        wgmma<kHalf, false, false>(s, q + WgmmaTile<D, kRows>::rows_at(0, k),
                                   tile + Tile::rows_at(part * kColumns + column, k), part + k > 0);
    wgmma_commit_group();
  };
  if (count == 0) return;
  float left[kHalf / 8][4], right[kHalf / 8][4];
  shared.pipeline.full(0).wait(0);
  issue(left, 0, 0);
  wgmma_wait_group<0>(left);
  // No branch around products, none under way at the end of a turn: the compiler would wait
  // for each. A branch around what is done meanwhile, never taken: it would else issue them
  // in the midst of that, and wait for the last of them. Past the last tile its left half
  // is computed and discarded.
  const int never = __shfl_sync(~0u, -1, 0);
  PipelineState<kStages> state;
  for (int i = 0; i < count; ++i) {
    issue(right, state.stage, kHalf);
    if (i != never) use(left, i, 0);
    wgmma_wait_group<0>(right);
    shared.pipeline.consumer_release(state.stage);
    if (i + 1 < count) {
      state.advance();
      shared.pipeline.consumer_wait(state);
    }
    issue(left, state.stage, 0);
    if (i != never) use(right, i, kHalf);
    wgmma_wait_group<0>(left);
  }
}

// Copies the queries of each warpgroup to shared memory and calls consume(), while the last warp
// copies tile after tile.
template <int D, int kGroups, class Scratch, class Consume>
__device__ void score_block(const Scratch& shared, int count, const Top1ChunkForward& p,
                            const QueryTile& mine, Consume&& consume) {
  if (threadIdx.x == 0) {
    shared.pipeline.init(kGroups * 4);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= kGroups * 128) {
    for (int i = 0; i < count && threadIdx.x % 32 == 0; ++i) shared.produce(i);
    return;
  }
  const int first = threadIdx.x / 128 * kRows;
  for (int i = threadIdx.x % 128; i < kRows * (D / 8); i += 128) {
    const int row = i / (D / 8), vector = i % (D / 8),
              t = mine.first + min(first + row, mine.count - 1);
    cp_async_16(shared.group().at(row, vector), head_row<D>(p.q, mine.b, t, mine.h) + vector * 8);
  }
  cp_async_commit_group();
  cp_async_wait_group<0>();
  fence_proxy_async();
  named_barrier_sync<128>(warpgroup_barrier(threadIdx.x / 128));
  consume();
}

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
