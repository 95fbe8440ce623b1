// The choice of chunks. A first kernel lays the columns that queries are scored against out in
// tiles, each a piece of memory that the copy engine brings in at once: the keys of a chunk
// (exact), or the means of 64 chunks (approx), each as the sum of two bf16, to 2^−17. The second
// scores tiles of queries against them and keeps the best of each query. The next best (top_k > 1)
// is found by going through all of them again.
#include "ops/cuda/attention.cuh"
#include "ops/cuda/wgmma.cuh"
#include "ops/top1_chunk/cuda_scores.cuh"

namespace assay::ops::cuda::top1 {
namespace {

// Keys of a tile: a chunk is one of them, or several of 128.
int tile_keys(const Top1ChunkForward& p) { return p.chunk_size <= 64 ? 64 : 128; }
int tiles_per_chunk(const Top1ChunkForward& p) { return int(ceil_div(p.chunk_size, tile_keys(p))); }
int64_t all_chunks(const Top1ChunkForward& p) { return ceil_div(p.time, p.chunk_size); }

// Keys into tiles. One block per chunk.
template <int D, int kKeys>
__global__ void __launch_bounds__(256)
    pack_keys_kernel(Top1ChunkForward p, bf16* columns, int tiles) {
  const int chunk = int(p.chunk_size), b = blockIdx.y / int(p.kv_heads),
            kv = blockIdx.y % int(p.kv_heads);
  const int64_t first = blockIdx.x * int64_t{chunk};
  if (first + chunk > p.time) return;  // a partial chunk is not a candidate
  bf16* to = columns + (blockIdx.y * int64_t{gridDim.x} + blockIdx.x) * tiles * kKeys * D;
#pragma unroll 4
  for (int i = threadIdx.x; i < chunk * (D / 8); i += 256) {
    const int row = i / (D / 8), vector = i % (D / 8);
    const WgmmaTile<D, kKeys> tile{to + row / kKeys * kKeys * D};
    *reinterpret_cast<uint4*>(tile.at(row % kKeys, vector)) =
        *reinterpret_cast<const uint4*>(head_row<D>(p.k, b, first + row, kv) + vector * 8);
  }
}

// The best candidate so far of each row. After rank 0 only those count that come after (score,
// chunk) of the rank before. Candidates are offered in rising order; the first of equals stays.
struct Best {
  float score = -INFINITY, previous;
  int chunk, previous_chunk, own;
  __device__ Best(const Top1ChunkForward& p, const QueryTile& mine, int i, const float* before,
                  int rank) {
    const int row = min(mine.row(i), mine.count - 1);
    own = mine.own(i);
    chunk = rank < own ? rank : -1;  // for want of a better one: scores may be NaN or −inf
    previous = rank == 0 ? INFINITY : before[mine.rows + row];
    previous_chunk = rank == 0 ? -1 : int(p.selected[(mine.rows + row) * p.top_k + rank - 1]);
  }
  __device__ void offer(float x, int c) {
    const bool left = x < previous || (x == previous && c > previous_chunk);
    if (c < own && x > score && left) {
      score = x;
      chunk = c;
    }
  }
  // Scores of row i of the lane: of chunks column + 8 n and + 1. kFirst: of rank 0; kAll: each
  // is a candidate.
  template <bool kFirst, bool kAll, int N>
  __device__ void offer_tile(const float (&s)[N][4], int i, int column) {
    const int limit = own - column, behind = previous_chunk - column;
    int at = -1;
#pragma unroll
    for (int c = 0; c < 2 * N; ++c) {
      const float x = s[c / 2][2 * i + c % 2];
      const int offset = c / 2 * 8 + c % 2;
      bool better = x > score;
      if (!kAll) better = better && offset < limit;
      if (!kFirst) better = better && (x < previous || (x == previous && offset > behind));
      score = better ? x : score;
      at = better ? offset : at;
    }
    if (at >= 0) chunk = column + at;
  }
  // The best of this and another lane, in both.
  __device__ void join(int lane_step) {
    const float x = __shfl_xor_sync(~0u, score, lane_step);
    const int c = __shfl_xor_sync(~0u, chunk, lane_step);
    if (x > score || (x == score && c < chunk)) {
      score = x;
      chunk = c;
    }
  }
  // Of row i of the lane.
  __device__ void write(const Top1ChunkForward& p, const QueryTile& mine, int i, float* before,
                        int rank) const {
    const int row = mine.row(i);
    if (row >= mine.count) return;
    p.selected[(mine.rows + row) * p.top_k + rank] = chunk;
    if (p.top_k > 1) before[mine.rows + row] = score;
  }
};

constexpr int kApproxGroups = 2, kExactGroups = 4;

template <int D, bool kFirst>
__global__ void __launch_bounds__(kApproxGroups * 128 + 32, D == 64 ? 3 : 2)
    approx_kernel(Top1ChunkForward p, SelectWorkspace scratch, int tiles, int rank) {
  const QueryTile mine(p, kApproxGroups * kRows);
  constexpr int kChunks = Layout<2>::kChunks;
  const ScoreSmem<D, kTileRows> shared(kApproxGroups, mine, scratch.columns, tiles);
  const int count = (mine.candidates + kChunks - 1) / kChunks;
  score_block<D, kApproxGroups>(shared, count, p, mine, [&] {
    Best best[2] = {{p, mine, 0, scratch.previous, rank}, {p, mine, 1, scratch.previous, rank}};
    score_tiles<D, kTileRows, kChunks>(
        shared, count, [&](const float(&s)[kChunks / 16][4], int tile, int first) {
          const int column = tile * kChunks + first + threadIdx.x % 4 * 2;
          const auto offer = [&](auto all) {
            constexpr bool kAll = decltype(all)::value;
            best[0].template offer_tile<kFirst, kAll>(s, 0, column);
            best[1].template offer_tile<kFirst, kAll>(s, 1, column);
          };
          if ((tile + 1) * kChunks <= mine.common) offer(std::true_type{});
          else offer(std::false_type{});
        });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      best[i].join(1);
      best[i].join(2);
      if (threadIdx.x % 4 == 0) best[i].write(p, mine, i, scratch.previous, rank);
    }
  });
}

// False: a sum did not fit, and nothing was written.
template <bool kPlain, int D, int kKeys>
__device__ bool exact(const Top1ChunkForward& p, const SelectWorkspace& scratch, int tiles,
                      const QueryTile& mine, int rank) {
  const ScoreSmem<D, kKeys> shared(kExactGroups, mine, scratch.columns, tiles, kPlain ? 0 : 1);
  const int chunk = int(p.chunk_size), steps = (chunk + kKeys - 1) / kKeys, row = threadIdx.x % 2;
  const int count = mine.candidates * steps;
  Best best(p, mine, row, scratch.previous, rank);
  bool fits = true;
  score_block<D, kExactGroups>(shared, count, p, mine, [&] {
    // from a lane of its own, so that it is in a register of each lane, not of the warp
    const float scale = __shfl_sync(~0u, float(p.scale) * kLog2e, threadIdx.x % 32);
    ChunkSum<kPlain, 3> sum;
    int candidate = 0, step = 0;
    score_tiles<D, kKeys, kKeys>(shared, count, [&](float(&s)[kKeys / 16][4], int, int first) {
      sum.add(s, scale, chunk - step * kKeys - first);
      if (first == 0 || ++step < steps) return;
      const float score = sum.finish();
      fits = fits && sum.fits(score);
      best.offer(score, candidate);
      sum = {.largest = sum.largest};
      step = 0;
      ++candidate;
    });
    fits = fits && sum.largest * fabsf(scale) < 120;
  });
  if (!__syncthreads_and(fits)) return false;
  if (threadIdx.x < kExactGroups * 128 && threadIdx.x % 4 < 2)
    best.write(p, mine, row, scratch.previous, rank);
  return true;
}

template <int D, int kKeys>
__global__ void __launch_bounds__(kExactGroups * 128 + 32, 1)
    exact_kernel(Top1ChunkForward p, SelectWorkspace scratch, int tiles, int rank) {
  const QueryTile mine(p, kExactGroups * kRows);
  // plain if every key of a tile counts
  if (p.chunk_size % kKeys || !exact<true, D, kKeys>(p, scratch, tiles, mine, rank))
    exact<false, D, kKeys>(p, scratch, tiles, mine, rank);
}

// One launch per rank, of so many warpgroups per block.
template <int D, int kTile, class Kernel>
void launch_ranks(const Top1ChunkForward& p, const SelectWorkspace& scratch, int groups,
                  int64_t tiles, Kernel* first, Kernel* later, Stream stream) {
  const unsigned blocks = unsigned(ceil_div(p.time, groups * kRows) * p.batch * p.heads);
  for (int rank = 0; rank < p.top_k; ++rank)
    launch_kernel(rank == 0 ? first : later, blocks, groups * 128 + 32,
                  ScoreSmem<D, kTile>::bytes(groups), stream, p, scratch, int(tiles), rank);
}

template <int D, int kKeys>
void exact_blocks(const Top1ChunkForward& p, const SelectWorkspace& scratch, Stream stream) {
  const dim3 chunks(unsigned(all_chunks(p)), unsigned(p.batch * p.kv_heads));
  launch_kernel(pack_keys_kernel<D, kKeys>, chunks, 256, 0, stream, p, scratch.columns,
                tiles_per_chunk(p));
  launch_ranks<D, kKeys>(p, scratch, kExactGroups, all_chunks(p) * tiles_per_chunk(p),
                         exact_kernel<D, kKeys>, exact_kernel<D, kKeys>, stream);
}

}  // namespace

SelectWorkspace::SelectWorkspace(const Top1ChunkForward& p, WorkspaceArena& arena)
    : columns(p.selection == Selection::exact
                  ? arena.take<bf16>(p.batch * p.kv_heads * all_chunks(p) * tiles_per_chunk(p) *
                                     tile_keys(p) * p.head_dim)
                  : take_summaries(p, arena)),
      previous(p.top_k > 1 ? arena.take<float>(p.batch * p.heads * p.time) : nullptr),
      slots(pair_slots(p)),
      listed(arena.take<uint16_t>(p.batch * p.heads * p.time * slots)),
      scores(arena.take<float>(p.batch * p.heads * p.time * slots)),
      pairs(p, arena, slots, kPairRun) {}

void select_chunks(const Top1ChunkForward& p, const SelectWorkspace& scratch, Stream stream) {
  if (p.selection == Selection::shortlist) return select_shortlist(p, scratch, stream);
  const bool approx = p.selection == Selection::approx;
  if (approx) summarise(p, scratch.columns, stream);
  with_head_dim(p.head_dim, [&](auto d) {
    if (approx)
      launch_ranks<d(), kTileRows>(p, scratch, kApproxGroups, summary_tiles(p),
                                   approx_kernel<d(), true>, approx_kernel<d(), false>, stream);
    else if (tile_keys(p) == 64) exact_blocks<d(), 64>(p, scratch, stream);
    else exact_blocks<d(), 128>(p, scratch, stream);
  });
}

}  // namespace assay::ops::cuda::top1
