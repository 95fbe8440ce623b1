// The choice by shortlist: each query's best chunks by cheap score, exact scores of these (cuda_pairs.cu), the best of them. Pairs of a query and a listed
// chunk are sorted by chunk, as queries are for the passes.
#include "ops/cuda/attention.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/wgmma.cuh"
#include "ops/top1_chunk/cuda_scores.cuh"

namespace assay::ops::cuda::top1 {
namespace {

constexpr int kGroups = 2;  // warpgroups of queries
constexpr int kKept = 8;    // best chunks that each of a row's four lanes keeps

// A score as an integer that orders as it does, NaN as the best, whose low bits say which chunk it
// is of; of equal scores the lower chunk is larger.
struct Keyed {
  int mask;
  __device__ int code(int chunk) const { return ~chunk & mask; }
  __device__ int key(float x, int code) const {
    const int bits = __float_as_int(x);
    return ((bits ^ (bits >> 31 & INT_MAX)) & ~mask) | code;
  }
  __device__ uint16_t chunk(int key) const {
    return key == INT_MIN ? kNoChunk : uint16_t(~key & mask);
  }
};

// The larger of the two first.
__device__ void order(int& a, int& b) {
  const int larger = max(a, b);
  b = min(a, b);
  a = larger;
}
// In order, of a list that rises and then falls or the other way round.
__device__ void bitonic_merge(int (&list)[kKept]) {
#pragma unroll
  for (int step = kKept / 2; step > 0; step /= 2)
#pragma unroll
    for (int i = 0; i < kKept; ++i)
      if (i % (2 * step) < step) order(list[i], list[i + step]);
}
// The best of a list and of four more: of each four and its opposite the larger.
__device__ void insert(int (&list)[kKept], int (&x)[4]) {
  order(x[0], x[1]);
  order(x[2], x[3]);
  order(x[0], x[2]);
  order(x[1], x[3]);
  order(x[1], x[2]);
#pragma unroll
  for (int i = 0; i < 4; ++i) list[kKept - 1 - i] = max(list[kKept - 1 - i], x[i]);
  bitonic_merge(list);
}

// Of each number and one of the lane `step` away, its opposite or its like, the larger
// or the smaller.
__device__ void select_half(int (&list)[kKept], int step, bool opposite, bool larger) {
  int other[kKept];
#pragma unroll
  for (int i = 0; i < kKept; ++i)
    other[i] = __shfl_xor_sync(~0u, list[opposite ? kKept - 1 - i : i], step);
#pragma unroll
  for (int i = 0; i < kKept; ++i)
    list[i] = larger ? max(list[i], other[i]) : min(list[i], other[i]);
}
// The lists of a row's four lanes become one: lane q has those of rank kKept · q and after.
__device__ void bitonic_sort_quad(int (&list)[kKept]) {
  const int lane = threadIdx.x % 4;
  select_half(list, 1, true, lane % 2 == 0);
  bitonic_merge(list);
  select_half(list, 3, true, lane < 2);
  select_half(list, 1, false, lane % 2 == 0);
  bitonic_merge(list);
}

// Inserts a tile's scores into the lists of a lane's two rows; the first is of `chunk`. kAll: each
// is a candidate.
template <int kParts, bool kAll>
__device__ void insert_scores(int (&list)[2][kKept], const float (&s)[kTileRows / 8][4],
                              const Keyed& keyed, int chunk, const int (&own)[2]) {
#pragma unroll
  for (int group = 0; group < kTileRows / 8 / kParts; group += 2) {
    int found[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int n = (group + i / 4) * kParts, e = i % 4, c = chunk + (group + i / 4) * 8 + e % 2;
      float x = s[n][e];
#pragma unroll
      for (int part = 1; part < kParts; ++part) x = fmaf(s[n + part][e], s[n + part][e], x);
      found[e / 2][i / 4 * 2 + e % 2] =
          kAll || c < own[e / 2] ? keyed.key(x, keyed.code(c)) : INT_MIN;
    }
    insert(list[0], found[0]);
    insert(list[1], found[1]);
  }
}

// The queries stay in registers; while one warpgroup waits for its products, others use theirs. A
// thread brings the tiles in.
template <int D, int kParts>
__global__ void __launch_bounds__(kGroups * 128, D == 128 ? 1 : 2)
    list_kernel(Top1ChunkForward p, ShortlistWorkspace scratch, int tiles, Keyed keyed) {
  constexpr int kChunks = Layout<kParts>::kChunks;
  using Tile = WgmmaTile<D, kTileRows>;
  const QueryTile mine(p, kGroups * kRows);
  const ScoreSmem<D, kTileRows> shared(kGroups, mine, scratch.columns, tiles);
  const int count = (mine.candidates + kChunks - 1) / kChunks;
  score_block<D, kGroups>(shared, count, p, mine, [&] {
    int list[2][kKept], own[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      own[i] = mine.own(i);
#pragma unroll
      for (int n = 0; n < kKept; ++n) list[i][n] = INT_MIN;
    }
    const WgmmaDescriptor first = warp_uniform(Tile{shared.tile(0)}.rows());
    const auto produce = [&](int i) {
      if (threadIdx.x == 0 && i < count) shared.produce(i);
    };
    uint32_t q[D / 16][4];
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
      load_a_mk(q[k], shared.group(), threadIdx.x % 128 / 32 * 16, k * 2);
    produce(0);
    produce(1);
    PipelineState<shared.kStages> state;
    for (int i = 0; i < count; ++i) {
      produce(i + 2);
      __syncwarp();
      shared.pipeline.consumer_wait(state);
      const WgmmaDescriptor tile = first + state.stage * (kTileRows * D / 8);
      float s[kTileRows / 8][4];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < D / 16; ++k) wgmma<64, false>(s, q[k], tile + Tile::rows_at(0, k), k > 0);
#pragma unroll
      for (int k = 0; k < D / 16; ++k)
        wgmma<64, false, 8>(s, q[k], tile + Tile::rows_at(64, k), k > 0);
      wgmma_commit_group();
      wgmma_wait_group<0>(s);
      shared.pipeline.consumer_release(state.stage);
      state.advance();
      const int chunk = i * kChunks + threadIdx.x % 4 * 2;
      if ((i + 1) * kChunks <= mine.common) insert_scores<kParts, true>(list, s, keyed, chunk, own);
      else insert_scores<kParts, false>(list, s, keyed, chunk, own);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bitonic_sort_quad(list[i]);
#pragma unroll
      for (int n = 0; n < kKept; n += 4) {
        const int slot = threadIdx.x % 4 * kKept + n;
        Vec<uint16_t, 4> four;
        for (int j = 0; j < 4; ++j)
          four[j] = slot + j < p.shortlist ? keyed.chunk(list[i][n + j]) : kNoChunk;
        if (slot < scratch.slots && mine.row(i) < mine.count)
          *reinterpret_cast<Vec<uint16_t, 4>*>(
              scratch.listed + (mine.rows + mine.row(i)) * scratch.slots + slot) = four;
      }
    }
  });
}

// A pair for a query.
Top1ChunkForward pairs_of(Top1ChunkForward p) {
  p.heads *= pair_slots(p);
  return p;
}

template <int D, int kParts>
void list_chunks(const Top1ChunkForward& p, const ShortlistWorkspace& scratch, Stream stream) {
  Keyed keyed{1};
  while (keyed.mask < scratch.lists.chunks) keyed.mask = keyed.mask * 2 + 1;
  launch_kernel(list_kernel<D, kParts>,
                unsigned(ceil_div(p.time, kGroups * kRows) * p.batch * p.heads), kGroups * 128,
                ScoreSmem<D, kTileRows>::bytes(kGroups), stream, p, scratch, int(summary_tiles(p)),
                keyed);
}

}  // namespace

ShortlistWorkspace::ShortlistWorkspace(const Top1ChunkForward& p, WorkspaceArena& arena)
    : columns(take_summaries(p, arena)),
      slots(int(pair_slots(p))),
      listed(arena.take<uint16_t>(p.batch * p.heads * p.time * slots)),
      scores(arena.take<float>(p.batch * p.heads * p.time * slots)),
      lists(pairs_of(p), arena, kPairRun) {}

void select_shortlist(const Top1ChunkForward& p, const ShortlistWorkspace& scratch, Stream stream) {
  summarise(p, scratch.columns, stream);
  with_head_dim(p.head_dim, [&](auto d) {
    if (summary_parts(p) == 4) list_chunks<d(), 4>(p, scratch, stream);
    else list_chunks<d(), 8>(p, scratch, stream);
  });
  if (p.time > p.chunk_size) sort_pairs(pairs_of(p), scratch.lists, scratch.listed, stream);
  pick_pairs(p, scratch, stream);
}

}  // namespace assay::ops::cuda::top1
