#pragma once
// QueryTile scored against tiles of columns that the copy engine brings in.
#include "ops/attention/top1_chunk/cuda_passes.cuh"
#include "ops/cuda/attention.cuh"
#include "ops/cuda/pipeline.cuh"
#include "ops/cuda/wgmma.cuh"

namespace assay::ops::cuda::top1 {

constexpr int kRows = 64;  // queries of a warpgroup
// A tile of summaries: the means of kTileChunks chunks, and then what rounding left of them.
constexpr int kTileChunks = 64;
constexpr int kTileRows = 2 * kTileChunks;
inline int64_t summary_tiles(const Top1ChunkForward& args) {
  return ceil_div(all_chunks(args), kTileChunks);
}
// Tiles of a key head after those of the one before. cuda_summaries.cu
bf16* take_summaries(const Top1ChunkForward& args, WorkspaceArena& arena);
void summarise(const Top1ChunkForward& args, bf16* columns, Stream stream);

constexpr int kExactGroups = 4;  // warpgroups of a block that chooses exactly
inline int64_t query_blocks(const Top1ChunkForward& args, int groups) {
  return ceil_div(args.time, groups * kRows) * args.batch * args.heads;
}

// A block's queries, some of one head; heaviest blocks first.
struct QueryTile {
  // candidates: chunks before the last query's own
  int b;
  int h;
  int kv;
  int first;
  int count;
  int candidates;
  int64_t rows;  // [B, H, T] of the first
  __device__ QueryTile(const Top1ChunkForward& args, int tile_rows) {
    const int heads = int(args.heads);
    const int time = int(args.time);
    b = int(blockIdx.x % (args.batch * heads)) / heads;
    h = blockIdx.x % heads;
    kv = h / (heads / int(args.kv_heads));
    const int tiles = (time + tile_rows - 1) / tile_rows;
    const int tile = tiles - 1 - int(blockIdx.x / (args.batch * heads));
    first = tile * tile_rows;
    count = min(tile_rows, time - first);
    candidates = (first + count - 1) / int(args.chunk_size);
    rows = (int64_t{b} * heads + h) * time + first;
  }
  // Row i of the lane, 0 or 1.
  __device__ static int row(int i) { return threadIdx.x / 32 * 16 + i * 8 + threadIdx.x % 32 / 4; }
};

// Layout of shared memory: the queries of each warpgroup, the tiles under way, their barriers.
template <int D, int kTile>
struct ScoreSmem {
  static constexpr int kStages = 3;
  bf16* queries;
  bf16* tiles;
  Pipeline<kStages> pipeline;
  static constexpr size_t bytes(int groups) {
    return (groups * kRows * D + kStages * kTile * D) * sizeof(bf16) + Pipeline<kStages>::kBytes +
           16;
  }
  __device__ explicit ScoreSmem(int groups) {
    extern __shared__ __align__(1024) unsigned char memory[];
    queries = reinterpret_cast<bf16*>(memory);
    tiles = queries + groups * kRows * D;
    pipeline.barriers = reinterpret_cast<uint64_t*>(tiles + kStages * kTile * D);
  }
  __device__ WgmmaTile<D, kRows> group() const { return {queries + threadIdx.x / 128 * kRows * D}; }
  __device__ bf16* tile(int stage) const { return tiles + stage * kTile * D; }
};

// One thread copies tile after tile: the first of a producer warp (score_tiles), or of the block
// (score_summaries).
template <int D, int kTile>
__device__ void produce_tile(const ScoreSmem<D, kTile>& shared, const bf16* from, int i) {
  constexpr int kStages = ScoreSmem<D, kTile>::kStages;
  constexpr int kBytes = kTile * D * sizeof(bf16);
  const int stage = i % kStages;
  const Mbarrier full = shared.pipeline.producer_acquire(stage, i / kStages % 2, kBytes);
  cp_async_bulk(shared.tile(stage), from + int64_t{i} * kTile * D, kBytes, full);
}
template <int D, int kTile>
__device__ void produce_tiles(const ScoreSmem<D, kTile>& shared, const bf16* from, int count) {
  if (threadIdx.x % 32) return;
  for (int i = 0; i < count; ++i) produce_tile(shared, from, i);
}

// Scores the warpgroup's queries against tile after tile, half a tile at a time: use(scores, tile
// number, first column). The tensor cores are one half ahead.
template <int D, int kTile, class Use>
__device__ void score_tiles(const ScoreSmem<D, kTile>& shared, int count, Use&& use) {
  constexpr int kStages = ScoreSmem<D, kTile>::kStages;
  constexpr int kHalf = kTile / 2;
  using Tile = WgmmaTile<D, kTile>;
  const WgmmaDescriptor q = warp_uniform(shared.group().rows());
  const WgmmaDescriptor tiles = warp_uniform(Tile{shared.tile(0)}.rows());
  auto issue = [&](float(&s)[kHalf / 8][4], int stage, int column) {
    const WgmmaDescriptor tile = tiles + stage * (kTile * D / 8);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
      wgmma<kHalf, false, false>(s, q + WgmmaTile<D, kRows>::rows_at(0, k),
                                 tile + Tile::rows_at(column, k), k > 0);
    wgmma_commit_group();
  };
  if (count == 0) return;
  float left[kHalf / 8][4];
  float right[kHalf / 8][4];
  shared.pipeline.full(0).wait(0);
  issue(left, 0, 0);
  wgmma_wait_group<0>(left);
  // No branch around products, none under way at the end of a turn: the compiler would wait
  // for each. A branch around what is done meanwhile, never taken: it would else issue them
  // in the midst of that, and wait for the last of them. Past the last tile its left half
  // is computed and discarded.
  const int never = __shfl_sync(~0u, -1, 0);
  for (int i = 0, stage = 0, phase = 0; i < count; ++i) {
    issue(right, stage, kHalf);
    if (i != never) use(left, i, 0);
    wgmma_wait_group<0>(right);
    shared.pipeline.consumer_release(stage);
    if (i + 1 < count) {
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
      shared.pipeline.full(stage).wait(phase);
    }
    issue(left, stage, 0);
    if (i != never) use(right, i, kHalf);
    wgmma_wait_group<0>(left);
  }
}

// As score_tiles, of tiles of summaries, with the queries in registers, a whole tile at a time:
// use(scores of its chunks, tile number). While a warpgroup waits for its products, others use
// theirs. A thread brings the tiles in, not a warp of its own: by all threads of the block, which
// are warpgroups of queries.
template <int D, class Use>
__device__ void score_summaries(const ScoreSmem<D, kTileRows>& shared, const bf16* from, int count,
                                Use&& use) {
  using Tile = WgmmaTile<D, kTileRows>;
  const WgmmaDescriptor first = warp_uniform(Tile{shared.tile(0)}.rows());
  const auto produce = [&](int i) {
    if (threadIdx.x == 0 && i < count) produce_tile(shared, from, i);
  };
  uint32_t q[D / 16][4];
#pragma unroll
  for (int k = 0; k < D / 16; ++k)
    load_a_mk(q[k], shared.group(), threadIdx.x % 128 / 32 * 16, k * 2);
  for (int i = 0; i < shared.kStages - 1; ++i) produce(i);
  PipelineState<shared.kStages> state;
  for (int i = 0; i < count; ++i) {
    produce(i + shared.kStages - 1);
    __syncwarp();
    shared.pipeline.consumer_wait(state);
    const WgmmaDescriptor tile = first + state.stage * (kTileRows * D / 8);
    float s[kTileChunks / 8][4];
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; ++k) wgmma<64, false>(s, q[k], tile + Tile::rows_at(0, k), k > 0);
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
      wgmma<64, false>(s, q[k], tile + Tile::rows_at(kTileChunks, k), true);
    wgmma_commit_group();
    wgmma_wait_group<0>(s);
    shared.pipeline.consumer_release(state.stage);
    state.advance();
    use(s, i);
  }
}

// Releases the tiles without scoring them.
template <int D, int kTile>
__device__ void skip_tiles(const ScoreSmem<D, kTile>& shared, int count) {
  PipelineState<ScoreSmem<D, kTile>::kStages> state;
  for (int i = 0; i < count; ++i) {
    shared.pipeline.consumer_wait(state);
    shared.pipeline.consumer_release(state.stage);
    state.advance();
  }
}

// The queries of a warpgroup to shared memory.
template <int D>
__device__ void copy_queries(WgmmaTile<D, kRows> to, const Top1ChunkForward& args,
                             const QueryTile& mine) {
  const int first = threadIdx.x / 128 * kRows;
  for (int i = threadIdx.x % 128; i < kRows * (D / 8); i += 128) {
    const int row = i / (D / 8);
    const int vector = i % (D / 8);
    const int t = mine.first + min(first + row, mine.count - 1);
    cp_async_16(to.at(row, vector), head_row<D>(args.q, mine.b, t, mine.h) + vector * 8, true);
  }
  cp_async_commit_group();
  cp_async_wait_group<0>();
  fence_proxy_async();
}

__device__ inline void square_add(float& sum, const uint4& x) {
  for (uint32_t pair : {x.x, x.y, x.z, x.w}) {
    const float2 u = unpack_bf16x2(pair);
    sum += u.x * u.x + u.y * u.y;
  }
}

// bound of a score in base 2: 2^(100 + log₂ 256) is finite, 2^−100 a normal number
constexpr float kBound = 100;
// The largest |scale · q·k| in base 2 that a warpgroup can meet, by Cauchy and Schwarz.
template <int D>
__device__ float score_bound(WgmmaTile<D, kRows> q, float scale, const float* key_norm,
                             int candidates) {
  // a warp
  __shared__ float queries[16];
  __shared__ float keys[16];
  float query = 0;
  float key = 0;
  for (int j = 0; j < D / 8; ++j)
    square_add(query, *reinterpret_cast<const uint4*>(q.at(threadIdx.x % kRows, j)));
  if (isnan(query)) query = INFINITY;
  for (int c = threadIdx.x % 128; c < candidates; c += 128) key = fmaxf(key, key_norm[c]);
  for (int step = 16; step > 0; step /= 2) {
    query = fmaxf(query, __shfl_xor_sync(~0u, query, step));
    key = fmaxf(key, __shfl_xor_sync(~0u, key, step));
  }
  const int warp = threadIdx.x / 32;
  const int first = warp / 4 * 4;
  queries[warp] = query;
  keys[warp] = key;
  named_barrier_sync<128>(warpgroup_barrier(warp / 4));
  for (int i = first; i < first + 4; ++i) {
    query = fmaxf(query, queries[i]);
    key = fmaxf(key, keys[i]);
  }
  return fabsf(scale) * sqrtf(query) * 1.001f * key;
}

template <int D, int kGroups, class Scratch, class Consume>
__device__ void score_block(Scratch shared, const bf16* from, int count,
                            const Top1ChunkForward& args, const QueryTile& mine,
                            Consume&& consume) {
  if (threadIdx.x == 0) {
    shared.pipeline.init(kGroups * 128);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= kGroups * 128) return produce_tiles(shared, from, count);
  copy_queries<D>(shared.group(), args, mine);
  named_barrier_sync<128>(warpgroup_barrier(threadIdx.x / 128));
  consume();
}

}  // namespace assay::ops::cuda::top1
