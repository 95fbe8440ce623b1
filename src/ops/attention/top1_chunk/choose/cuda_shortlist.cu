// The choice by shortlist: each query's best chunks by cheap score, exact scores of these, the best
// of them. Pairs of a query and a listed chunk are sorted by chunk, as queries are for the passes,
// so that a chunk's keys are brought in once per segment.
#include "ops/attention/top1_chunk/attend/cuda_chunk.cuh"
#include "ops/attention/top1_chunk/choose/cuda_scores.cuh"

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
  // The score without the bits that the chunk took; NaN of INT_MIN.
  __device__ float score(int key) const {
    const int bits = key & ~mask;
    return __int_as_float(bits ^ (bits >> 31 & INT_MAX));
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

// Replaces each number with the larger or the smaller of it and a number of the lane `step` away,
// which is at the opposite place of the list or at the same place.
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
      const int n = (group + i / 4) * kParts;
      const int e = i % 4;
      const int c = chunk + (group + i / 4) * 8 + e % 2;
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

template <int D, int kParts>
__global__ void __launch_bounds__(kGroups * 128, D == 128 ? 1 : 2)
    list_kernel(Top1ChunkForward p, SelectWorkspace scratch, int tiles, Keyed keyed) {
  constexpr int kChunks = Layout<kParts>::kChunks;
  const QueryTile mine(p, kGroups * kRows);
  const ScoreSmem<D, kTileRows> shared(kGroups);
  const bf16* from =
      scratch.columns + (int64_t{mine.b} * p.kv_heads + mine.kv) * tiles * kTileRows * D;
  const int common = mine.first / int(p.chunk_size);  // these are every query's candidates
  const int count = (mine.candidates + kChunks - 1) / kChunks;
  score_block<D, kGroups>(shared, from, count, p, mine, [&] {
    int list[2][kKept];
    int own[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      own[i] = (mine.first + min(mine.row(i), mine.count - 1)) / int(p.chunk_size);
#pragma unroll
      for (int n = 0; n < kKept; ++n) list[i][n] = INT_MIN;
    }
    score_whole_tiles<D, kTileRows, kTileRows>(
        shared, from, count, [&](const float(&s)[kTileRows / 8][4], int tile) {
          const int chunk = tile * kChunks + threadIdx.x % 4 * 2;
          if ((tile + 1) * kChunks <= common)
            insert_scores<kParts, true>(list, s, keyed, chunk, own);
          else insert_scores<kParts, false>(list, s, keyed, chunk, own);
        });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bitonic_sort_quad(list[i]);
#pragma unroll
      for (int n = 0; n < kKept; n += 4) {
        const int slot = threadIdx.x % 4 * kKept + n;
        Vec<uint16_t, 4> four;
        for (int j = 0; j < 4; ++j) {
          four[j] = slot + j < p.shortlist ? keyed.chunk(list[i][n + j]) : kNoChunk;
        }
        if (slot < scratch.slots && mine.row(i) < mine.count)
          *reinterpret_cast<Vec<uint16_t, 4>*>(
              scratch.listed + (mine.rows + mine.row(i)) * scratch.slots + slot) = four;
      }
    }
  });
}

// Exact scores of the pairs of a segment. A row does not depend on its neighbours: the order of
// pairs does not matter.
template <int D>
__global__ void __launch_bounds__(kThreads, D == 64 ? 6 : 3)
    pair_kernel(Top1ChunkForward p, SelectWorkspace scratch, int padded, int slot_bits) {
  const Lists& lists = scratch.pairs;
  // A head after the other: the queries of one fit into the L2 cache.
  const int kv_heads = int(p.kv_heads);
  const int head = blockIdx.x / lists.segments;
  const int time = int(p.time);
  const int b = head / kv_heads;
  const int kv = head % kv_heads;
  const int chunk = int(p.chunk_size);
  const Segment segment = lists.table[blockIdx.x];
  if (segment.begin == segment.end) return;
  const ChunkSmem<D, 1> shared(padded);
  const int64_t rows = int64_t{head} * lists.items;
  const int* order = lists.order + rows;
  const bf16* from = head_row<D>(p.q, b, 0, kv * int(p.heads / p.kv_heads));
  const float scale = float(p.scale) * kLog2e;
  const Limits limits{{chunk, chunk}, chunk, chunk};
  const auto read_items = [&](int(&item)[2], int first) {
    for (int i = 0; i < 2; ++i) item[i] = order[min(first + lane_row(i), segment.end - 1)];
  };
  const auto fetch = [&](int stage, const int(&item)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = item[i] >> slot_bits;
      const int g = query < time ? 0 : query / time;
      copy_query(shared.queries(stage), lane_row(i),
                 from + (query - g * time) * p.q.time_stride + g * D);
    }
    cp_async_commit_group();
  };
  // read long before they are needed
  int item[2];
  int next[2];
  read_items(item, segment.begin);
  read_items(next, segment.begin + kTile);
  shared.copy(shared.keys(0), p.k, b, segment.chunk * chunk, kv, chunk);
  fetch(0, item);
  for (int first = segment.begin, stage = 0; first < segment.end; first += kTile, stage ^= 1) {
    cp_async_wait_group<0>();
    fence_proxy_async();
    __syncthreads();
    int later[2];
    if (first + kTile < segment.end) fetch(stage ^ 1, next);
    read_items(later, first + 2 * kTile);
    float sum[2];
    float offset[2] = {0, 0};
    const auto add = [&] {
      sum[0] = sum[1] = 0;
      each_product(shared, stage, limits, [&](float(&s)[kKeys / 8][4], int key) {
        exponentials(s, sum, key, limits, scale, offset);
      });
      for (float& x : sum) x = quad_sum(x);
    };
    add();
    if (find_offsets(offset, sum, shared, stage, limits, scale)) add();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (threadIdx.x % 4 == i && first + lane_row(i) < segment.end)
        scratch.scores[rows + item[i]] = offset[i] + __log2f(sum[i]);
      item[i] = next[i];
      next[i] = later[i];
    }
  }
}

// The top_k best of each query's list. Exact keeps the choice of a query whose list is empty. One
// thread per query.
__global__ void __launch_bounds__(256) pick_kernel(Top1ChunkForward p, SelectWorkspace scratch) {
  const int64_t row = blockIdx.x * int64_t{256} + threadIdx.x;
  if (row >= p.batch * p.heads * p.time) return;
  const int64_t first = row * scratch.slots;
  float before = INFINITY;
  int before_chunk = -1;
  for (int rank = 0; rank < p.top_k; ++rank) {
    float best = -INFINITY;
    int best_chunk = -1;
#pragma unroll 4
    for (int slot = 0; slot < scratch.slots; slot += 4) {
      const auto chunks = *reinterpret_cast<const Vec<uint16_t, 4>*>(scratch.listed + first + slot);
      const auto scores = load_float4(scratch.scores + first + slot);
      for (int i = 0; i < 4; ++i) {
        const int chunk = chunks[i];
        const float x = isnan(scores[i]) ? INFINITY : scores[i];
        const bool left = x < before || (x == before && chunk > before_chunk);
        const bool better = best_chunk < 0 || x > best || (x == best && chunk < best_chunk);
        if (chunk == kNoChunk || !left || !better) continue;
        best = x;
        best_chunk = chunk;
      }
    }
    if (best_chunk < 0 && p.selection == Selection::exact) return;
    p.selected[row * p.top_k + rank] = best_chunk;
    before = best;
    before_chunk = best_chunk < 0 ? INT_MAX : best_chunk;
  }
}

}  // namespace

void choose_listed(const Top1ChunkForward& p, const SelectWorkspace& scratch, Stream stream) {
  if (p.time > p.chunk_size) {
    sort_pairs(p, scratch.pairs, scratch.listed, stream);
    with_head_dim(p.head_dim, [&](auto d) {
      launch_kernel(pair_kernel<d()>, unsigned(p.batch * p.kv_heads * scratch.pairs.segments),
                    kThreads, ChunkSmem<d(), 1>::bytes(padded_chunk(p)), stream, p, scratch,
                    padded_chunk(p), std::countr_zero(unsigned(scratch.slots)));
    });
  }
  launch_threads(pick_kernel, p.batch * p.heads * p.time, 256, stream, p, scratch);
}

void select_shortlist(const Top1ChunkForward& p, const SelectWorkspace& scratch, Stream stream) {
  summarise(p, scratch.columns, stream);
  Keyed keyed{1};
  while (keyed.mask < scratch.pairs.chunks) keyed.mask = keyed.mask * 2 + 1;
  with_head_dim(p.head_dim, [&](auto d) {
    launch_kernel(summary_parts(p) == 4 ? list_kernel<d(), 4> : list_kernel<d(), 8>,
                  unsigned(query_blocks(p, kGroups)), kGroups * 128,
                  ScoreSmem<d(), kTileRows>::bytes(kGroups), stream, p, scratch,
                  int(summary_tiles(p)), keyed);
  });
  choose_listed(p, scratch, stream);
}

}  // namespace assay::ops::cuda::top1
