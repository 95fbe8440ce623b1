// The choice of chunks. A first kernel lays the columns that queries are scored against out in
// tiles, each a piece of memory that the copy engine brings in at once: the keys of a chunk
// (exact), or the means of 64 chunks (approx), each as the sum of two bf16, to 2^−17. The second
// scores tiles of queries against them and keeps the best of each query. The next best (top_k > 1)
// is found by going through all of them again.
#include "ops/attention/top1_chunk/choose/cuda_scores.cuh"
#include "ops/attention/top1_chunk/cuda_sums.cuh"
#include "ops/cuda/attention.cuh"
#include "ops/cuda/wgmma.cuh"

namespace assay::ops::cuda::top1 {
namespace {

// Keys into tiles, and the longest of each chunk. One block per chunk.
template <int D, int kKeys>
__global__ void __launch_bounds__(256)
    pack_keys_kernel(Top1ChunkForward args, SelectWorkspace s, int tiles) {
  // lanes of a row, a power of 2
  constexpr int kVectors = D / 8;
  constexpr int kLanes = kVectors <= 8 ? 8 : 16;
  __shared__ float longest[256 / kLanes];
  const int chunk = int(args.chunk_size);
  const int lane = threadIdx.x % kLanes;
  const int first_row = threadIdx.x / kLanes;
  const int b = blockIdx.y / int(args.kv_heads);
  const int kv = blockIdx.y % int(args.kv_heads);
  const int64_t first = blockIdx.x * int64_t{chunk};
  if (first + chunk > args.time) return;  // a partial chunk is not a candidate
  bf16* to = s.columns + (blockIdx.y * int64_t{gridDim.x} + blockIdx.x) * tiles * kKeys * D;
  float longest_here = 0;
#pragma unroll 4
  for (int row = first_row; row - first_row < chunk; row += 256 / kLanes) {
    float square = 0;
    if (lane < kVectors && row < chunk) {
      const uint4 x =
          *reinterpret_cast<const uint4*>(head_row<D>(args.k, b, first + row, kv) + lane * 8);
      *reinterpret_cast<uint4*>(
          WgmmaTile<D, kKeys>{to + row / kKeys * kKeys * D}.at(row % kKeys, lane)) = x;
      square_add(square, x);
    }
    for (int step = 1; step < kLanes; step *= 2) square += __shfl_xor_sync(~0u, square, step);
    longest_here = fmaxf(longest_here, isnan(square) ? INFINITY : square);
  }
  if (lane == 0) longest[first_row] = longest_here;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (float x : longest) longest_here = fmaxf(longest_here, x);
  s.key_norm[blockIdx.y * int64_t{gridDim.x} + blockIdx.x] = sqrtf(longest_here) * 1.001f;
}

// The best candidate so far of each row. After rank 0 only those count that come after (score,
// chunk) of the rank before. Candidates are offered in rising order; the first of equals stays.
struct Best {
  float score = -INFINITY;
  float previous;
  int chunk;
  int previous_chunk;
  int own;
  __device__ Best(const Top1ChunkForward& args, const QueryTile& mine, int i, const float* before,
                  int rank) {
    const int row = min(mine.row(i), mine.count - 1);
    own = (mine.first + row) / int(args.chunk_size);
    chunk = rank < own ? rank : -1;  // for want of a better one: scores may be NaN or −inf
    previous = rank == 0 ? INFINITY : before[mine.rows + row];
    previous_chunk = rank == 0 ? -1 : int(args.selected[(mine.rows + row) * args.top_k + rank - 1]);
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
    const int limit = own - column;
    const int behind = previous_chunk - column;
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
  // Writes the chunk chosen for row i of the lane and, where top_k > 1, its score.
  __device__ void write(const Top1ChunkForward& args, const QueryTile& mine, int i, float* before,
                        int rank) const {
    const int row = mine.row(i);
    if (row >= mine.count) return;
    args.selected[(mine.rows + row) * args.top_k + rank] = chunk;
    if (args.top_k > 1) before[mine.rows + row] = score;
  }
};

constexpr int kApproxGroups = 2;

template <int D, bool kFirst>
__global__ void __launch_bounds__(kApproxGroups * 128, D == 64 ? 3 : 1)
    approx_kernel(Top1ChunkForward args, SelectWorkspace scratch, int tiles, int rank) {
  const QueryTile mine(args, kApproxGroups * kRows);
  constexpr int kChunks = kTileChunks;
  const ScoreSmem<D, kTileRows> shared(kApproxGroups);
  const int count = (mine.candidates + kChunks - 1) / kChunks;
  const bf16* from =
      scratch.columns + (int64_t{mine.b} * args.kv_heads + mine.kv) * tiles * kTileRows * D;
  score_block<D, kApproxGroups>(shared, from, count, args, mine, [&] {
    const int common = mine.first / int(args.chunk_size);  // these are every query's candidates
    Best best[2] = {{args, mine, 0, scratch.previous, rank},
                    {args, mine, 1, scratch.previous, rank}};
    score_summaries<D>(shared, from, count, [&](const float(&s)[kChunks / 8][4], int tile) {
      const int column = tile * kChunks + threadIdx.x % 4 * 2;
      const auto offer = [&](auto all) {
        constexpr bool kAll = decltype(all)::value;
        best[0].template offer_tile<kFirst, kAll>(s, 0, column);
        best[1].template offer_tile<kFirst, kAll>(s, 1, column);
      };
      if ((tile + 1) * kChunks <= common) offer(std::true_type{});
      else offer(std::false_type{});
    });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      best[i].join(1);
      best[i].join(2);
      if (threadIdx.x % 4 == 0) best[i].write(args, mine, i, scratch.previous, rank);
    }
  });
}

template <bool kBounded, int D, int kKeys>
__device__ void exact(const ScoreSmem<D, kKeys>& shared, const Top1ChunkForward& args,
                      const SelectWorkspace& scratch, const QueryTile& mine, int rank) {
  const int chunk = int(args.chunk_size);
  const int steps = (chunk + kKeys - 1) / kKeys;
  const int row = threadIdx.x % 2;
  // in a register: an instruction has one constant
  const float scale = __shfl_sync(~0u, float(args.scale) * kLog2e, 0);
  Best best(args, mine, row, scratch.previous, rank);
  ChunkSum<kBounded> sum;
  int candidate = 0;
  int step = 0;
  score_tiles<D, kKeys>(shared, mine.candidates * steps,
                        [&](const float(&s)[kKeys / 16][4], int, int first) {
                          if constexpr (kBounded) sum.add(s, scale);
                          else sum.add(s, scale, chunk - step * kKeys - first);
                          if (first == 0 || ++step < steps) return;
                          best.offer(sum.finish(), candidate);
                          sum = {};
                          step = 0;
                          ++candidate;
                        });
  if (threadIdx.x % 4 < 2) best.write(args, mine, row, scratch.previous, rank);
}

template <int D, int kKeys>
__global__ void __launch_bounds__(kExactGroups * 128 + 32, 1)
    exact_kernel(Top1ChunkForward args, SelectWorkspace scratch, int tiles, int rank) {
  if (scratch.again && !scratch.again[blockIdx.x]) return;
  const QueryTile mine(args, kExactGroups * kRows);
  const ScoreSmem<D, kKeys> shared(kExactGroups);
  const int64_t head = int64_t{mine.b} * args.kv_heads + mine.kv;
  const int steps = (int(args.chunk_size) + kKeys - 1) / kKeys;
  const int count = mine.candidates * steps;
  score_block<D, kExactGroups>(
      shared, scratch.columns + head * tiles * kKeys * D, count, args, mine, [&] {
        const float* norms = scratch.key_norm + head * (tiles / steps);
        const bool whole = args.chunk_size % kKeys == 0;  // every key of a tile counts
        if (whole && score_bound<D>(shared.group(), float(args.scale) * kLog2e, norms,
                                    mine.candidates) <= kBound)
          exact<true>(shared, args, scratch, mine, rank);
        else exact<false>(shared, args, scratch, mine, rank);
      });
}

// One launch per rank, of so many warpgroups of queries per block and so many threads.
template <int D, int kTile, class Kernel>
void launch_ranks(const Top1ChunkForward& args, const SelectWorkspace& scratch, int groups,
                  int threads, int64_t tiles, Kernel* first, Kernel* later, Stream stream) {
  const unsigned blocks = unsigned(query_blocks(args, groups));
  for (int rank = 0; rank < args.top_k; ++rank)
    launch_kernel(rank == 0 ? first : later, blocks, threads, ScoreSmem<D, kTile>::bytes(groups),
                  stream, args, scratch, int(tiles), rank);
}

template <int D, int kKeys>
void choose_exactly(const Top1ChunkForward& args, const SelectWorkspace& scratch, Stream stream) {
  const dim3 chunks(unsigned(all_chunks(args)), unsigned(args.batch * args.kv_heads));
  launch_kernel(pack_keys_kernel<D, kKeys>, chunks, 256, 0, stream, args, scratch,
                tiles_per_chunk(args));
  if (scratch.again) {
    filter_chunks(args, scratch, all_chunks(args) * tiles_per_chunk(args), stream);
    choose_listed(args, scratch, stream);
  }
  launch_ranks<D, kKeys>(args, scratch, kExactGroups, kExactGroups * 128 + 32,
                         all_chunks(args) * tiles_per_chunk(args), exact_kernel<D, kKeys>,
                         exact_kernel<D, kKeys>, stream);
}

}  // namespace

SelectWorkspace::SelectWorkspace(const Top1ChunkForward& args, WorkspaceArena& arena)
    : columns(args.selection == Selection::exact
                  ? arena.take<bf16>(args.batch * args.kv_heads * all_chunks(args) *
                                     tiles_per_chunk(args) * tile_keys(args) * args.head_dim)
                  : take_summaries(args, arena)),
      key_norm(arena.take<float>(args.batch * args.kv_heads * all_chunks(args))),
      previous(args.top_k > 1 ? arena.take<float>(args.batch * args.heads * args.time) : nullptr),
      again(filters_chunks(args) ? arena.take<int>(query_blocks(args, kExactGroups)) : nullptr),
      listed(arena.take<uint16_t>(args.batch * args.heads * args.time * listed_chunks(args))),
      scores(arena.take<float>(args.batch * args.heads * args.time * listed_chunks(args))),
      pairs(args, arena, listed_chunks(args), kPairRun) {}

void select_chunks(const Top1ChunkForward& args, const SelectWorkspace& scratch, Stream stream) {
  const bool approx = args.selection == Selection::approx;
  if (approx) summarise(args, scratch.columns, stream);
  with_head_dim(args.head_dim, [&](auto d) {
    if (approx)
      launch_ranks<d(), kTileRows>(args, scratch, kApproxGroups, kApproxGroups * 128,
                                   summary_tiles(args), approx_kernel<d(), true>,
                                   approx_kernel<d(), false>, stream);
    else if (tile_keys(args) == 64) choose_exactly<d(), 64>(args, scratch, stream);
    else choose_exactly<d(), 128>(args, scratch, stream);
  });
}

}  // namespace assay::ops::cuda::top1
