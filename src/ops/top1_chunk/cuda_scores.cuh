#pragma once
// Queries scored against tiles of columns that the copy engine brings in: what the choice and the shortlist share.
#include "ops/top1_chunk/cuda_passes.cuh"
#include "ops/top1_chunk/cuda_wgmma.cuh"

namespace assay::ops::cuda::top1 {

constexpr int kRows = 64;  // queries of a warpgroup

// A block's queries, some of one head; heaviest blocks first.
struct Queries {
  int b, h, kv, first, count, candidates;  // candidates: chunks before the last query's own
  int64_t rows;                            // [B, H, T] of the first
  __device__ Queries(const Top1ChunkForward& p, int tile_rows) {
    const int heads = int(p.heads), time = int(p.time);
    b = int(blockIdx.x % (p.batch * heads)) / heads, h = blockIdx.x % heads, kv = h / (heads / int(p.kv_heads));
    const int tiles = (time + tile_rows - 1) / tile_rows, tile = tiles - 1 - int(blockIdx.x / (p.batch * heads));
    first = tile * tile_rows, count = min(tile_rows, time - first);
    candidates = (first + count - 1) / int(p.chunk_size);
    rows = (int64_t{b} * heads + h) * time + first;
  }
  // Row i of the lane, 0 or 1.
  __device__ static int row(int i) { return threadIdx.x / 32 * 16 + i * 8 + threadIdx.x % 32 / 4; }
};

// Where things lie: the queries of each warpgroup, the tiles under way, their barriers.
template <int D, int kTileRows>
struct Shared {
  static constexpr int kStages = 3;
  bf16 *queries, *tiles;
  uint64_t* barriers;
  static constexpr size_t bytes(int groups) {
    return (groups * kRows * D + kStages * kTileRows * D) * sizeof(bf16) + 2 * kStages * sizeof(uint64_t) + 16;
  }
  __device__ explicit Shared(int groups) {
    extern __shared__ __align__(1024) unsigned char memory[];
    queries = reinterpret_cast<bf16*>(memory), tiles = queries + groups * kRows * D;
    barriers = reinterpret_cast<uint64_t*>(tiles + kStages * kTileRows * D);
  }
  __device__ Panels<D, kRows> group() const { return {queries + threadIdx.x / 128 * kRows * D}; }
  __device__ bf16* tile(int stage) const { return tiles + stage * kTileRows * D; }
  __device__ Barrier full(int stage) const { return {barriers + stage}; }
  __device__ Barrier empty(int stage) const { return {barriers + kStages + stage}; }
};

// The last warp: brings the tiles in, one after the other.
template <int D, int kTileRows>
__device__ void bring_tiles(const Shared<D, kTileRows>& shared, const bf16* from, int count) {
  if (threadIdx.x % 32) return;
  constexpr int kStages = Shared<D, kTileRows>::kStages, kBytes = kTileRows * D * sizeof(bf16);
  for (int i = 0; i < count; ++i) {
    const int stage = i % kStages;
    shared.empty(stage).wait(i / kStages % 2 ^ 1);
    shared.full(stage).arrive_and_expect(kBytes);
    copy_bulk(shared.tile(stage), from + int64_t{i} * kTileRows * D, kBytes, shared.full(stage));
  }
}

// Scores the warpgroup's queries against tile after tile, half a tile at a time: use(scores, tile number, first
// column). The tensor cores are one half ahead. A tile's column is the sum of kTileRows / kColumns rows of it.
template <int D, int kTileRows, int kColumns, class Use>
__device__ void score_tiles(const Shared<D, kTileRows>& shared, int count, Use&& use) {
  constexpr int kStages = Shared<D, kTileRows>::kStages, kHalf = kColumns / 2;
  using Columns = Panels<D, kColumns>;
  const Descriptor q = uniform(shared.group().rows()), tiles = uniform(Columns{shared.tile(0)}.rows());
  auto issue = [&](float(&s)[kHalf / 8][4], int stage, int column) {
    const Descriptor tile = tiles + stage * (kTileRows * D / 8);
    begin_products();
#pragma unroll
    for (int part = 0; part < kTileRows / kColumns; ++part)
#pragma unroll
      for (int k = 0; k < D / 16; ++k)
        product<kHalf, false, false>(s, q + Panels<D, kRows>::rows_at(0, k),
                                     tile + part * (kColumns * D / 8) + Columns::rows_at(column, k), part + k > 0);
    commit_products();
  };
  if (count == 0) return;
  float left[kHalf / 8][4], right[kHalf / 8][4];
  shared.full(0).wait(0);
  issue(left, 0, 0), wait_products(), pin(left);
  // No branch around products, none under way at the end of a turn: the compiler would wait for each. A branch around
  // what is done meanwhile, never taken: it would else issue them in the midst of that, and wait for the last of them.
  // Behind the last tile its left half is scored in vain.
  const int never = __shfl_sync(~0u, -1, 0);
  for (int i = 0, stage = 0, phase = 0; i < count; ++i) {
    issue(right, stage, kHalf);
    if (i != never) use(left, i, 0);
    wait_products(), pin(right);
    if (threadIdx.x % 32 == 0) shared.empty(stage).arrive();
    if (i + 1 < count) {
      if (++stage == kStages) stage = 0, phase ^= 1;
      shared.full(stage).wait(phase);
    }
    issue(left, stage, 0);
    if (i != never) use(right, i, kHalf);
    wait_products(), pin(left);
  }
}

// The queries of a warpgroup to shared memory.
template <int D>
__device__ void copy_queries(Panels<D, kRows> to, const Top1ChunkForward& p, const Queries& mine) {
  const int first = threadIdx.x / 128 * kRows;
  for (int i = threadIdx.x % 128; i < kRows * (D / 8); i += 128) {
    const int row = i / (D / 8), vector = i % (D / 8), t = mine.first + min(first + row, mine.count - 1);
    copy_async(to.at(row, vector), row_of<D>(p.q, mine.b, t, mine.h) + vector * 8, true);
  }
  commit_copies(), wait_copies<0>(), publish_shared();
}

template <int D, int kGroups, class Scratch, class Consume>
__device__ void score_block(Scratch shared, const bf16* from, int count, const Top1ChunkForward& p, const Queries& mine,
                            Consume&& consume) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < Scratch::kStages; ++i) shared.full(i).init(1), shared.empty(i).init(kGroups * 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= kGroups * 128) return bring_tiles(shared, from, count);
  copy_queries<D>(shared.group(), p, mine);
  sync_group(1 + threadIdx.x / 128);
  consume();
}

}  // namespace assay::ops::cuda::top1
