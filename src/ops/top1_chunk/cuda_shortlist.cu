// The choice by shortlist: summaries of the chunks into tiles, each query's best chunks by cheap
// score, exact scores of these (cuda_pairs.cu), the best of them. Pairs of a query and a listed
// chunk are sorted by chunk, as queries are for the passes.
#include "ops/cuda/attention.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/wgmma.cuh"
#include "ops/top1_chunk/cuda_scores.cuh"

namespace assay::ops::cuda::top1 {
namespace {

constexpr int kTileRows = 128;  // of a tile of summaries
constexpr int kGroups = 2;      // warpgroups of queries
constexpr int kKept = 8;        // best chunks that each of a row's four lanes keeps

// A chunk has kParts rows, its mean and axes; rows of eight chunks make kParts n-tiles, so that a
// lane holds all of a chunk's products.
template <int kParts>
struct Layout {
  static constexpr int kChunks = kTileRows / kParts;  // of a tile
  __device__ static int row(int chunk, int part) {
    return (chunk % kChunks / 8 * kParts + part) * 8 + chunk % 8;
  }
};

// Numbers as the sum of two bf16: what is packed of each in a word.
struct Split {
  uint32_t high, low;
};
__device__ Split split(float x, float y) {
  const uint32_t high = pack_bf16x2(x, y);
  const float2 rounded = unpack_bf16x2(high);
  return {high, pack_bf16x2(x - rounded.x, y - rounded.y)};
}

// Eight rows of float32, axes or what they were: rows 0 … 7 of an operand hold their high parts,
// rows 8 … 15 the low ones, so that a product has both, and their sum is in one lane.
constexpr int kAxisRows = 8;

// partial[warp][i][d] = Σ_j (k_j · s_i) k_j[d] over the warp's part of the keys; kMean: Σ_j k_j[d].
template <int D, bool kMean>
__device__ void weighted_sums(float (*partial)[kAxisRows][D], SwizzledTile<D> keys,
                              const float (*s)[D], int padded) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, column = lane % 4 * 2;
  uint32_t axes[D / 16][4];
#pragma unroll
  for (int k = 0; k < D / 16 && !kMean; ++k)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* from = s[row] + k * 16 + half * 8 + column;
      const Split x = split(from[0], from[1]);
      axes[k][2 * half] = x.high;
      axes[k][2 * half + 1] = x.low;
    }
  float sum[D / 8][4] = {};
  for (int key = warp * 16; key < padded; key += 4 * 16) {
    const uint32_t one = pack_bf16x2(1, 1);
    uint32_t weights[4] = {one, 0, one, 0};
    if (!kMean) {
      float y[2][4] = {};
#pragma unroll
      for (int k = 0; k < D / 16; ++k) {
        uint32_t x[4];
        load_b_nk(x, keys, key, k * 2);
        mma_m16n16k16(y[0], y[1], axes[k], x);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Split x = split(y[half][0] + y[half][2], y[half][1] + y[half][3]);
        weights[2 * half] = x.high;
        weights[2 * half + 1] = x.low;
      }
    }
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      uint32_t x[4];
      load_b_kn(x, keys, key, n * 2);
      mma_m16n16k16(sum[2 * n], sum[2 * n + 1], weights, x);
    }
  }
#pragma unroll
  for (int n = 0; n < D / 8; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) partial[warp][row][n * 8 + column + e] = sum[n][e] + sum[n][e + 2];
}

template <int D>
__device__ float warp_dot(const float* a, const float* b) {
  float sum = 0;
  for (int d = threadIdx.x % 32; d < D; d += 32) sum += a[d] * b[d];
  return warp_sum(sum);
}

// to_i = A s_i from those sums, or that at unit length: Σ_j ((k_j − μ) · s_i) (k_j − μ) / C. A
// warp an axis.
template <int D, bool kUnit>
__device__ void times_covariance(float (*to)[D], const float (*partial)[kAxisRows][D],
                                 const float (*s)[D], const float* mean, float share) {
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < kAxisRows; i += 4) {
    const float middle = warp_dot<D>(mean, s[i]);
    float x[D / 32], square = 0;
#pragma unroll
    for (int n = 0; n < D / 32; ++n) {
      const int d = n * 32 + lane;
      x[n] = (partial[0][i][d] + partial[1][i][d] + partial[2][i][d] + partial[3][i][d]) * share;
      x[n] -= middle * mean[d];
      square += x[n] * x[n];
    }
    const float factor = kUnit ? rsqrtf(fmaxf(warp_sum(square), 1e-30f)) : 1;
#pragma unroll
    for (int n = 0; n < D / 32; ++n) to[i][n * 32 + lane] = x[n] * factor;
  }
}

// Number d of u_i, what is left of w_i when its parts along earlier ones are taken away, with
// m[i][j] = s_i · w_j: the rows of L⁻¹ w, L the Cholesky factor of m. An axis of which nothing is
// left is 0.
template <int D, int kAxes>
__device__ void separate(float (&u)[kAxes], const float (*w)[D], const float (*m)[kAxisRows],
                         int d) {
  constexpr float kTiny = 1e-6f;
  float l[kAxes][kAxes], inverse[kAxes];
#pragma unroll
  for (int i = 0; i < kAxes; ++i) {
    float left = m[i][i];
    u[i] = w[i][d];
#pragma unroll
    for (int j = 0; j < i; ++j) {
      l[i][j] = m[i][j];
#pragma unroll
      for (int k = 0; k < j; ++k) l[i][j] -= l[i][k] * l[j][k];
      l[i][j] *= inverse[j];
      left -= l[i][j] * l[i][j];
      u[i] -= l[i][j] * u[j];
    }
    inverse[i] = left > kTiny * m[i][i] ? rsqrtf(fmaxf(left, 1e-30f)) : 0;
    u[i] = inverse[i] > 0 ? u[i] * inverse[i] : 0;
  }
}

int padded_chunk(const Top1ChunkForward& p) { return int(ceil_div(p.chunk_size, 16) * 16); }

// Means and axes as chunk_summaries of the operator has them, times s and s / √2, into tiles. A
// block a chunk.
template <int D, int kParts>
__global__ void __launch_bounds__(128, D == 64 ? 6 : 1)
    summary_kernel(Top1ChunkForward p, bf16* columns, int tiles, int padded) {
  constexpr int kAxes = kParts - 1;
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ float mean[D], s[kAxisRows][D], w[kAxisRows][D], partial[4][kAxisRows][D],
      m[kAxisRows][kAxisRows];
  const int chunk = int(p.chunk_size), rank = int(p.rank), c = blockIdx.x, warp = threadIdx.x / 32;
  const int b = blockIdx.y / int(p.kv_heads), kv = blockIdx.y % int(p.kv_heads);
  const SwizzledTile<D> keys{reinterpret_cast<bf16*>(memory)};
  if ((c + 1) * int64_t{chunk} > p.time) return;  // a partial chunk is not a candidate
  copy_rows(keys, p.k, b, c * int64_t{chunk}, kv, chunk, padded);
  cp_async_commit_group();
  cp_async_wait_group<0>();
  __syncthreads();
  weighted_sums<D, true>(partial, keys, nullptr, padded);
  __syncthreads();
  const float share = 1 / float(chunk);
  for (int place = threadIdx.x; place < kAxisRows * D; place += 128) {
    const int i = place / D, d = place % D;
    const float x =
        (partial[0][0][d] + partial[1][0][d] + partial[2][0][d] + partial[3][0][d]) * share;
    s[i][d] = i < rank ? to_compute(keys.at(i * chunk / rank, d / 8)[d % 8]) - x : 0;
    if (i == 0) mean[d] = x;
  }
  __syncthreads();
  weighted_sums<D, false>(partial, keys, s, padded);
  __syncthreads();
  times_covariance<D, true>(w, partial, s, mean, share);
  __syncthreads();
  weighted_sums<D, false>(partial, keys, w, padded);
  __syncthreads();
  // now the axes are in w, A times them in s
  times_covariance<D, false>(s, partial, w, mean, share);
  __syncthreads();
  for (int i = warp; i < kAxes; i += 4)
    for (int j = 0; j <= i; ++j) {
      const float x = warp_dot<D>(w[i], s[j]);
      if (threadIdx.x % 32 == 0) m[i][j] = x;
    }
  __syncthreads();
  if (threadIdx.x >= D) return;
  const int d = threadIdx.x;
  const WgmmaTile<D, kTileRows> tile{
      columns + (blockIdx.y * int64_t{tiles} + c / Layout<kParts>::kChunks) * kTileRows * D};
  // eight rows from one part to the next
  bf16* to = tile.at(Layout<kParts>::row(c, 0), d / 8) + d % 8;
  const auto put = [&](int part, float x) { to[part * 8 * kPanel<D>] = __float2bfloat16(x); };
  const float scale = float(p.scale);
  put(0, scale * mean[d]);
  float u[kAxes];
  separate<D, kAxes>(u, s, m, d);
#pragma unroll
  for (int i = 0; i < kAxes; ++i) put(1 + i, 0.7071067812f * scale * u[i]);
}

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

// Keys of half a tile's scores, a lane's two rows, to `found`: of chunks from `chunk` on. kAll:
// each is a candidate.
template <int kParts, bool kAll>
__device__ void key_scores(int (&found)[2][4], const float (&s)[8][4], const Keyed& keyed,
                           int chunk, bool second, const int (&own)[2]) {
#pragma unroll
  for (int group = 0; group < 8 / kParts; ++group)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float x = s[group * kParts][e];
#pragma unroll
      for (int part = 1; part < kParts; ++part)
        x = fmaf(s[group * kParts + part][e], s[group * kParts + part][e], x);
      const int c = chunk + group * 8 + e % 2, key = keyed.key(x, keyed.code(c));
      found[e / 2][(kParts == 8 ? second : group) * 2 + e % 2] =
          kAll || c < own[e / 2] ? key : INT_MIN;
    }
}

// Scores the warpgroup's queries against tile after tile: use(scores, tile number, first column),
// half a tile each time. The queries stay in registers; while one warpgroup waits for its products,
// others use theirs. A thread brings the tiles in.
template <int D, class Use>
__device__ void score_lists(const ScoreSmem<D, kTileRows>& shared, const bf16* from, int count,
                            Use&& use) {
  constexpr int kStages = ScoreSmem<D, kTileRows>::kStages, kHalf = kTileRows / 2;
  using Columns = WgmmaTile<D, kTileRows>;
  const WgmmaDescriptor tiles = warp_uniform(Columns{shared.tile(0)}.rows());
  const auto produce = [&](int i) {
    if (threadIdx.x == 0 && i < count) produce_tile(shared, from, i);
  };
  uint32_t q[D / 16][4];
#pragma unroll
  for (int k = 0; k < D / 16; ++k)
    load_a_mk(q[k], shared.group(), threadIdx.x % 128 / 32 * 16, k * 2);
  produce(0);
  produce(1);
  for (int i = 0, stage = 0, phase = 0; i < count; ++i) {
    produce(i + 2);
    __syncwarp();
    shared.pipeline.full(stage).wait(phase);
    float s[2][kHalf / 8][4];
    wgmma_fence();
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int k = 0; k < D / 16; ++k)
        wgmma<kHalf, false>(s[half], q[k],
                            tiles + stage * (kTileRows * D / 8) + Columns::rows_at(half * kHalf, k),
                            k > 0);
    wgmma_commit_group();
    wgmma_wait_group<0>(s[0], s[1]);
    shared.pipeline.consumer_release(stage);
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
    use(s[0], i, 0);
    use(s[1], i, kHalf);
  }
}

template <int D, int kParts>
__global__ void __launch_bounds__(kGroups * 128, D == 128 ? 1 : 2)
    list_kernel(Top1ChunkForward p, ShortlistWorkspace scratch, int tiles, Keyed keyed) {
  using L = Layout<kParts>;
  const QueryTile mine(p, kGroups * kRows);
  const ScoreSmem<D, kTileRows> shared(kGroups);
  const int count = (mine.candidates + L::kChunks - 1) / L::kChunks;
  const bf16* from =
      scratch.columns + (int64_t{mine.b} * p.kv_heads + mine.kv) * tiles * kTileRows * D;
  score_block<D, kGroups>(shared, from, count, p, mine, [&] {
    // found: scores of a tile's halves, until there are four
    int list[2][kKept], found[2][4], own[2];
    const int common = mine.first / int(p.chunk_size);  // these are every query's candidates
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      own[i] = (mine.first + min(mine.row(i), mine.count - 1)) / int(p.chunk_size);
#pragma unroll
      for (int n = 0; n < kKept; ++n) list[i][n] = INT_MIN;
    }
    score_lists<D>(shared, from, count, [&](const float(&s)[8][4], int tile, int first) {
      const int chunk = tile * L::kChunks + first / kParts + threadIdx.x % 4 * 2;
      if ((tile + 1) * L::kChunks <= common)
        key_scores<kParts, true>(found, s, keyed, chunk, first > 0, own);
      else key_scores<kParts, false>(found, s, keyed, chunk, first > 0, own);
      if (kParts == 4 || first > 0) {
        insert(list[0], found[0]);
        insert(list[1], found[1]);
      }
    });
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

int parts(const Top1ChunkForward& p) { return p.rank <= 3 ? 4 : 8; }
int64_t tiles_per_head(const Top1ChunkForward& p) {
  return ceil_div(ceil_div(p.time, p.chunk_size), kTileRows / parts(p));
}
// A pair for a query.
Top1ChunkForward pairs_of(Top1ChunkForward p) {
  p.heads *= pair_slots(p);
  return p;
}

template <int D, int kParts>
void list_chunks(const Top1ChunkForward& p, const ShortlistWorkspace& scratch, Stream stream) {
  const int64_t chunks = ceil_div(p.time, p.chunk_size);
  const int tiles = int(tiles_per_head(p)), bytes = int(padded_chunk(p) * D * sizeof(bf16));
  Keyed keyed{1};
  while (keyed.mask < chunks) keyed.mask = keyed.mask * 2 + 1;
  launch_kernel(summary_kernel<D, kParts>, dim3(unsigned(chunks), unsigned(p.batch * p.kv_heads)),
                128, bytes, stream, p, scratch.columns, tiles, padded_chunk(p));
  launch_kernel(list_kernel<D, kParts>,
                unsigned(ceil_div(p.time, kGroups * kRows) * p.batch * p.heads), kGroups * 128,
                ScoreSmem<D, kTileRows>::bytes(kGroups), stream, p, scratch, tiles, keyed);
}

}  // namespace

ShortlistWorkspace::ShortlistWorkspace(const Top1ChunkForward& p, WorkspaceArena& arena)
    : columns(arena.take<bf16>(p.batch * p.kv_heads * tiles_per_head(p) * kTileRows * p.head_dim)),
      slots(int(pair_slots(p))),
      listed(arena.take<uint16_t>(p.batch * p.heads * p.time * slots)),
      scores(arena.take<float>(p.batch * p.heads * p.time * slots)),
      lists(pairs_of(p), arena, kPairRun) {}

void select_shortlist(const Top1ChunkForward& p, const ShortlistWorkspace& scratch, Stream stream) {
  with_head_dim(p.head_dim, [&](auto d) {
    if (parts(p) == 4) list_chunks<d(), 4>(p, scratch, stream);
    else list_chunks<d(), 8>(p, scratch, stream);
  });
  if (p.time > p.chunk_size) sort_pairs(pairs_of(p), scratch.lists, scratch.listed, stream);
  pick_pairs(p, scratch, stream);
}

}  // namespace assay::ops::cuda::top1
