// Exact scores of the pairs of a query and a chunk on its shortlist, which come sorted by chunk, so
// that a chunk's keys are brought in once a segment; and the best of each query's.
#include "ops/cuda/attention.cuh"
#include "ops/top1_chunk/cuda_scores.cuh"

namespace assay::ops::cuda::top1 {
namespace {

// A warp takes kTiles tiles of 16 queries at a time, which share what it reads of the keys. kKeys:
// of one step.
constexpr int kWarps = 4, kTiles = 2, kWarpRows = 16 * kTiles, kKeys = 32;

int padded_chunk(const Top1ChunkForward& p) { return int(ceil_div(p.chunk_size, kKeys) * kKeys); }
template <int D>
size_t pair_bytes(const Top1ChunkForward& p) {
  return (padded_chunk(p) + 2 * kWarps * kWarpRows) * D * sizeof(bf16);
}

// Of a warp's rows a lane looks after one, lane / 4 of the eight in group lane % 4.
static_assert(kWarpRows == 32);
__device__ int lane_row() { return threadIdx.x % 4 * 8 + threadIdx.x % 32 / 4; }

// A warp's queries g · T + t, of which the lane knows its own row's.
template <int D>
__device__ void fetch_queries(SwizzledTile<D> to, const Top1ChunkForward& p, const bf16* head,
                              int query) {
  const int lane = threadIdx.x % 32, time = int(p.time), g = query < time ? 0 : query / time;
  const bf16* mine = head + (query - g * time) * p.q.time_stride + g * D;
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    const auto from = reinterpret_cast<const bf16*>(
        __shfl_sync(~0u, reinterpret_cast<unsigned long long>(mine), lane / 4 * 4 + part));
#pragma unroll
    for (int vector = lane % 4; vector < D / 8; vector += 4)
      cp_async_16(to.at(part * 8 + lane / 4, vector), from + vector * 8, true);
  }
}

// Products of the tiles of queries with kKeys keys from `key` on.
template <int D>
__device__ void score_keys(float (&s)[kTiles][kKeys / 8][4], const uint32_t (&q)[kTiles][D / 16][4],
                           SwizzledTile<D> keys, int key) {
#pragma unroll
  for (int kk = 0; kk < D / 16; ++kk)
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      uint32_t k[4];
      load_b_nk(k, keys, key + n * 16, kk * 2);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        mma_m16n16k16(s[tile][2 * n], s[tile][2 * n + 1], q[tile][kk], k);
    }
}

// Of the lane's row over a chunk's keys. Plain: the sum itself (ChunkSum).
template <bool kPlain, int D>
__device__ float sum_keys(const uint32_t (&q)[kTiles][D / 16][4], SwizzledTile<D> keys, int chunk,
                          float scale) {
  ChunkSum<kPlain> sum[kTiles];
  for (int key = 0; key < chunk; key += kKeys) {
    float s[kTiles][kKeys / 8][4] = {};
    score_keys(s, q, keys, key);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) sum[tile].add(s[tile], scale, chunk - key);
  }
  const float first = sum[0].finish(), second = sum[1].finish();
  return threadIdx.x & 2 ? second : first;
}

// Exact scores of the pairs of a segment: a warp takes kWarpRows at a time, the next on their way.
// Rows whose plain sum does not fit start again. A row does not depend on its neighbours: the order
// of pairs does not matter.
template <int D>
__global__ void __launch_bounds__(kWarps * 32, D == 64 ? 4 : 2)
    pair_kernel(Top1ChunkForward p, ShortlistWorkspace scratch, int padded, int slot_bits) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Lists& lists = scratch.lists;
  // A head after the other: the queries of one fit into the L2 cache.
  const int kv_heads = int(p.kv_heads), head = blockIdx.x / lists.segments;
  const int b = head / kv_heads, kv = head % kv_heads, chunk = int(p.chunk_size),
            warp = threadIdx.x / 32;
  const Segment segment = lists.table[blockIdx.x];
  if (segment.begin == segment.end) return;
  const SwizzledTile<D> keys{reinterpret_cast<bf16*>(memory)};
  auto queries = [&](int stage) {
    return SwizzledTile<D>{keys.data + (padded + (warp * 2 + stage) * kWarpRows) * D};
  };
  const int64_t rows = int64_t{head} * lists.items;
  const int* order = lists.order + rows;
  const bf16* from = head_row<D>(p.q, b, 0, kv * int(p.heads / p.kv_heads));
  const float scale = __shfl_sync(~0u, float(p.scale) * kLog2e, 0);
  const bool whole = chunk % kKeys == 0;
  constexpr int kStep = kWarps * kWarpRows;
  int first = segment.begin + warp * kWarpRows;
  const auto item_of = [&](int first) { return order[min(first + lane_row(), segment.end - 1)]; };
  int item = item_of(first), next = item_of(first + kStep);  // read long before they are needed
  copy_rows(keys, p.k, b, segment.chunk * int64_t{chunk}, kv, chunk, padded);
  fetch_queries(queries(0), p, from, item >> slot_bits);
  cp_async_commit_group();
  cp_async_wait_group<0>();
  __syncthreads();
  for (int stage = 0; first < segment.end; first += kStep, stage ^= 1) {
    if (first + kStep < segment.end) fetch_queries(queries(stage ^ 1), p, from, next >> slot_bits);
    const int later = item_of(first + 2 * kStep);
    cp_async_commit_group();
    cp_async_wait_group<1>();
    __syncwarp();
    uint32_t q[kTiles][D / 16][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int kk = 0; kk < D / 16; ++kk) load_a_mk(q[tile][kk], queries(stage), tile * 16, kk * 2);
    float score = 0;
    if (whole) score = sum_keys<true>(q, keys, chunk, scale);
    const bool fits = ChunkSum<true>::fits(score);
    score = __log2f(score);
    if (!__all_sync(~0u, fits)) {
      const float again = sum_keys<false>(q, keys, chunk, scale);
      if (!fits) score = again;
    }
    if (first + lane_row() < segment.end) scratch.scores[rows + item] = score;
    item = next;
    next = later;
    __syncwarp();
  }
}

// The top_k best of each query's shortlist. One thread per query.
__global__ void __launch_bounds__(256) pick_kernel(Top1ChunkForward p, ShortlistWorkspace scratch) {
  const int64_t row = blockIdx.x * int64_t{256} + threadIdx.x;
  if (row >= p.batch * p.heads * p.time) return;
  const int64_t first = row * scratch.slots;
  float before = INFINITY;
  int before_chunk = -1;
  for (int rank = 0; rank < p.top_k; ++rank) {
    float best = -INFINITY;
    int best_chunk = -1;
#pragma unroll 4
    for (int slot = 0; slot < p.shortlist; ++slot) {
      const int chunk = scratch.listed[first + slot];
      float x = chunk == kNoChunk ? -INFINITY : scratch.scores[first + slot];
      if (isnan(x)) x = INFINITY;
      const bool left = chunk != kNoChunk && (x < before || (x == before && chunk > before_chunk));
      const bool better = best_chunk < 0 || x > best || (x == best && chunk < best_chunk);
      if (left && better) {
        best = x;
        best_chunk = chunk;
      }
    }
    p.selected[row * p.top_k + rank] = best_chunk;
    before = best;
    before_chunk = best_chunk < 0 ? INT_MAX : best_chunk;
  }
}

}  // namespace

void pick_pairs(const Top1ChunkForward& p, const ShortlistWorkspace& scratch, Stream stream) {
  if (p.time > p.chunk_size)
    with_head_dim(p.head_dim, [&](auto d) {
      launch_kernel(pair_kernel<d()>, unsigned(p.batch * p.kv_heads * scratch.lists.segments),
                    kWarps * 32, pair_bytes<d()>(p), stream, p, scratch, padded_chunk(p),
                    std::countr_zero(unsigned(scratch.slots)));
    });
  launch_threads(pick_kernel, p.batch * p.heads * p.time, 256, stream, p, scratch);
}

}  // namespace assay::ops::cuda::top1
