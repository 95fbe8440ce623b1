// The choice by shortlist: summaries of the chunks into tiles, each query's best chunks by cheap score, exact scores of
// these, the best of them. Pairs of a query and a listed chunk are sorted by chunk, as queries are for the passes, so
// that a chunk's keys are brought in once a segment: slot i of head h is a head of its own, [B, H · shortlist, T].
#include "ops/top1_chunk/cuda_scores.cuh"

namespace assay::ops::cuda::top1 {
namespace {

constexpr int kTileRows = 128;  // of a tile of summaries
constexpr int kGroups = 2;      // warpgroups of queries
constexpr int kKept = 8;        // best chunks that each of a row's four lanes keeps
constexpr float kLargest = 3e38f;
constexpr int kPairRuns = 1024;  // of the sort: shortlist times as many items as queries

// A chunk has kParts rows, its mean and axes; rows of eight chunks make kParts n-tiles, so that a lane holds all of a
// chunk's products.
template <int kParts>
struct Layout {
  static constexpr int kChunks = kTileRows / kParts;  // of a tile
  __device__ static int row(int chunk, int part) { return (chunk % kChunks / 8 * kParts + part) * 8 + chunk % 8; }
};

using Row8 = Pack<float, 8>;

// out[i][d] = Σ_j y[j][i] k_j[d] / C of rows k_j in shared memory, for i < count; y null: Σ k_j / C.
template <int D, int kAxes>
__device__ void weighted_sums(float (*out)[D], const bf16* keys, const float (*y)[8], int chunk, int count) {
  constexpr int kStreams = 128 / D;
  __shared__ float partial[kStreams][kAxes][D];
  const int d = threadIdx.x % D, stream = threadIdx.x / D;
  float sum[kAxes] = {};
#pragma unroll 4
  for (int j = stream; j < chunk && stream < kStreams; j += kStreams) {
    const float x = real(keys[j * (D + 8) + d]);
    const Row8 weights = y ? *reinterpret_cast<const Row8*>(y[j]) : Row8{};
#pragma unroll
    for (int i = 0; i < kAxes; ++i) sum[i] += y ? weights.at[i] * x : x;
  }
  if (stream < kStreams)
    for (int i = 0; i < kAxes; ++i) partial[stream][i][d] = sum[i];
  __syncthreads();
  for (int i = threadIdx.x; i < count * D; i += 128) {
    float total = 0;
    for (int s = 0; s < kStreams; ++s) total += partial[s][i / D][i % D];
    out[i / D][i % D] = total / float(chunk);
  }
  __syncthreads();
}

__device__ float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
template <int D>
__device__ float warp_dot(const float* a, const float* b) {
  float sum = 0;
  for (int d = threadIdx.x % 32; d < D; d += 32) sum += a[d] * b[d];
  return warp_sum(sum);
}

// y[j][i] = (k_j − mean) · axis_i
template <int D, int kAxes>
__device__ void along_axes(float (*y)[8], const bf16* keys, const float* mean, const float (*axis)[D], int chunk) {
  __shared__ float middle[kAxes];
  for (int i = threadIdx.x / 32; i < kAxes; i += 4) {
    const float x = warp_dot<D>(mean, axis[i]);
    if (threadIdx.x % 32 == 0) middle[i] = x;
  }
  __syncthreads();
  for (int j = threadIdx.x; j < chunk; j += 128) {
    float sum[kAxes] = {};
    for (int vector = 0; vector < D / 8; ++vector) {
      const uint4 x = *reinterpret_cast<const uint4*>(keys + j * (D + 8) + vector * 8);
      const float2 u[4] = {unpack(x.x), unpack(x.y), unpack(x.z), unpack(x.w)};
#pragma unroll
      for (int i = 0; i < kAxes; ++i) {
        const Row8 along = *reinterpret_cast<const Row8*>(axis[i] + vector * 8);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[i] += u[e].x * along.at[2 * e] + u[e].y * along.at[2 * e + 1];
      }
    }
    for (int i = 0; i < kAxes; ++i) y[j][i] = sum[i] - middle[i];
  }
  __syncthreads();
}

template <int D>
size_t summary_bytes(const Top1ChunkForward& p) {
  return p.chunk_size * ((D + 8) * sizeof(bf16) + 8 * sizeof(float));
}

// Means and axes as chunk_summaries of the operator has them, into tiles. A block a chunk.
template <int D, int kParts>
__global__ void __launch_bounds__(128) summary_kernel(Top1ChunkForward p, bf16* columns, int tiles) {
  constexpr int kAxes = kParts - 1;
  constexpr float kTiny = 1e-6f;
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ __align__(32) float mean[1][D], s[kAxes][D], w[kAxes][D];
  const int chunk = int(p.chunk_size), rank = int(p.rank), c = blockIdx.x;
  const int b = blockIdx.y / int(p.kv_heads), kv = blockIdx.y % int(p.kv_heads);
  bf16* keys = reinterpret_cast<bf16*>(memory);
  float(*y)[8] = reinterpret_cast<float(*)[8]>(keys + chunk * (D + 8));
  if ((c + 1) * int64_t{chunk} > p.time) return;  // a partial chunk is nobody's candidate
  for (int i = threadIdx.x; i < chunk * (D / 8); i += 128)
    *reinterpret_cast<uint4*>(keys + i / (D / 8) * (D + 8) + i % (D / 8) * 8) =
        *reinterpret_cast<const uint4*>(row_of<D>(p.k, b, c * int64_t{chunk} + i / (D / 8), kv) + i % (D / 8) * 8);
  __syncthreads();
  weighted_sums<D, 1>(mean, keys, nullptr, chunk, 1);
  for (int i = threadIdx.x; i < kAxes * D; i += 128)
    s[i / D][i % D] = i / D < rank ? real(keys[i / D * chunk / rank * (D + 8) + i % D]) - mean[0][i % D] : 0;
  __syncthreads();
  along_axes<D, kAxes>(y, keys, mean[0], s, chunk);
  weighted_sums<D, kAxes>(s, keys, y, chunk, kAxes);
  for (int i = threadIdx.x / 32; i < kAxes; i += 4) {
    const float scale = rsqrtf(fmaxf(warp_dot<D>(s[i], s[i]), 1e-30f));
    for (int d = threadIdx.x % 32; d < D; d += 32) s[i][d] *= scale;
  }
  __syncthreads();
  along_axes<D, kAxes>(y, keys, mean[0], s, chunk);
  weighted_sums<D, kAxes>(w, keys, y, chunk, kAxes);
  if (threadIdx.x < 32)
    for (int i = 0; i < kAxes; ++i) {  // w_i becomes u_i
      const float all = warp_dot<D>(w[i], s[i]);
      for (int before = 0; before < i; ++before) {
        const float part = warp_dot<D>(w[before], s[i]);
        for (int d = threadIdx.x; d < D; d += 32) w[i][d] -= part * w[before][d];
        __syncwarp();
      }
      const float left = warp_dot<D>(w[i], s[i]), factor = left > kTiny * all ? rsqrtf(fmaxf(left, 1e-30f)) : 0;
      for (int d = threadIdx.x; d < D; d += 32) w[i][d] = factor > 0 ? w[i][d] * factor : 0;
      __syncwarp();
    }
  __syncthreads();
  const Panels<D, kTileRows> tile{columns +
                                  (blockIdx.y * int64_t{tiles} + c / Layout<kParts>::kChunks) * kTileRows * D};
  for (int i = threadIdx.x; i < kParts * D; i += 128) {
    const int part = i / D, d = i % D;
    tile.at(Layout<kParts>::row(c, part), d / 8)[d % 8] = __float2bfloat16(part == 0 ? mean[0][d] : w[part - 1][d]);
  }
}

// A score whose low bits say which chunk it is of, so that it sorts by itself; of equal ones the lower chunk is larger.
struct Keyed {
  uint32_t mask;
  __device__ float key(float x, int chunk) const {
    x = !(x < kLargest) ? kLargest : fmaxf(x, -kLargest);  // NaN is the best
    const uint32_t bits = __float_as_uint(x);
    return __uint_as_float((bits & ~mask) | (uint32_t(chunk) ^ (~uint32_t(int(bits) >> 31) & mask)));
  }
  __device__ int chunk(float key) const {
    const uint32_t bits = __float_as_uint(key);
    return key == -INFINITY ? -1 : int((bits ^ ~uint32_t(int(bits) >> 31)) & mask);
  }
};

// The larger of the two first.
__device__ void order(float& a, float& b) {
  const float larger = fmaxf(a, b);
  b = fminf(a, b), a = larger;
}
// The best of a list and of four more: of each four and its opposite the larger, which first rise and then fall, or the
// other way round; halved until they are in order.
__device__ void insert(float (&list)[kKept], float (&x)[4]) {
  order(x[0], x[1]), order(x[2], x[3]), order(x[0], x[2]), order(x[1], x[3]), order(x[1], x[2]);
#pragma unroll
  for (int i = 0; i < 4; ++i) list[kKept - 1 - i] = fmaxf(list[kKept - 1 - i], x[i]);
#pragma unroll
  for (int step = kKept / 2; step > 0; step /= 2)
#pragma unroll
    for (int i = 0; i < kKept; ++i)
      if (i % (2 * step) < step) order(list[i], list[i + step]);
}

// The largest of the quad's lists, which leaves its list; in all four lanes.
__device__ float take_largest(float (&list)[kKept]) {
  float x = fmaxf(list[0], __shfl_xor_sync(~0u, list[0], 1));
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
  const bool mine = list[0] == x;
#pragma unroll
  for (int i = 0; i + 1 < kKept; ++i) list[i] = mine ? list[i + 1] : list[i];
  if (mine) list[kKept - 1] = -INFINITY;
  return x;
}

template <int D, int kParts>
__global__ void __launch_bounds__(kGroups * 128 + 32, D == 128 ? 1 : 2)
    list_kernel(Top1ChunkForward p, ShortlistScratch scratch, int tiles, Keyed keyed) {
  using L = Layout<kParts>;
  const Queries mine(p, kGroups * kRows);
  const Shared<D, kTileRows> shared(kGroups);
  const int count = (mine.candidates + L::kChunks - 1) / L::kChunks;
  const bf16* from = scratch.columns + (int64_t{mine.b} * p.kv_heads + mine.kv) * tiles * kTileRows * D;
  score_block<D, kGroups>(shared, from, count, p, mine, [&] {
    float list[2][kKept], found[2][4];  // found: scores of a tile's halves, until there are four
    int own[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      own[i] = (mine.first + min(mine.row(i), mine.count - 1)) / int(p.chunk_size);
#pragma unroll
      for (int n = 0; n < kKept; ++n) list[i][n] = -INFINITY;
    }
    const float scale = float(p.scale), half = 0.5f * scale * scale;
    score_tiles<D, kTileRows, kTileRows>(shared, count, [&](const float(&s)[8][4], int tile, int first) {
      const int chunk = tile * L::kChunks + first / kParts + threadIdx.x % 4 * 2;
#pragma unroll
      for (int group = 0; group < 8 / kParts; ++group)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float squares = 0;
#pragma unroll
          for (int part = 1; part < kParts; ++part) {
            const float x = s[group * kParts + part][e];
            squares = fmaf(x, x, squares);
          }
          const int c = chunk + group * 8 + e % 2;
          const float x = fmaf(half, squares, scale * s[group * kParts][e]);
          found[e / 2][((kParts == 8 ? first > 0 : group) * 2) + e % 2] = c < own[e / 2] ? keyed.key(x, c) : -INFINITY;
        }
      if (kParts == 4 || first > 0) insert(list[0], found[0]), insert(list[1], found[1]);
    });
    int64_t* out = scratch.listed + (mine.rows - mine.first) * p.shortlist + mine.first;
    for (int slot = 0; slot < p.shortlist; ++slot)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int chunk = keyed.chunk(take_largest(list[i]));
        if (threadIdx.x % 4 == 0 && mine.row(i) < mine.count) out[slot * p.time + mine.row(i)] = chunk;
      }
  });
}

// Pairs: a warp takes kTiles tiles of 16 queries at a time, which share what it reads of the keys.
constexpr int kWarps = 4, kTiles = 2, kWarpRows = 16 * kTiles, kKeys = 32;  // kKeys: of one step

int padded_chunk(const Top1ChunkForward& p) { return int(ceil_div(p.chunk_size, kKeys) * kKeys); }
template <int D>
size_t pair_bytes(const Top1ChunkForward& p) {
  return (padded_chunk(p) + 2 * kWarps * kWarpRows) * D * sizeof(bf16);
}

// log₂ Σ exp2 of a chunk's logits, running over its keys: a lane's two rows and its own columns.
struct Running {
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {};  // a large product, and the sum relative to it
  // sign: of the scale. Products behind `limit` do not count. kMaximum: top becomes the largest so far; else it stays.
  template <bool kMaximum>
  __device__ void add(float (&s)[kKeys / 8][4], float scale, float sign, int limit) {
    const int column = threadIdx.x % 4 * 2;
    if (limit < kKeys)
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = column + n * 8 + e % 2 < limit ? s[n][e] : -INFINITY * sign;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float size = scale * sign;
      float largest = top[i];
      if (kMaximum) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) largest = fmaxf(largest, fmaxf(s[n][2 * i] * sign, s[n][2 * i + 1] * sign));
        sum[i] *= exp2_fast(top[i] > -INFINITY ? (top[i] - largest) * size : 0);
      }
      const float shift = largest > -INFINITY ? largest * size : 0;
      float total[2] = {sum[i], 0};
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) total[e] += exp2_fast(fmaf(s[n][2 * i + e], scale, -shift));
      top[i] = largest, sum[i] = total[0] + total[1];
    }
  }
  // Whether the first top did: the sums of a row's lanes can be brought together.
  __device__ bool fits() const {
    bool all = true;
    for (int i = 0; i < 2; ++i) all = all && sum[i] < (top[i] > -INFINITY ? 0x1p60f : 0x1p-60f);
    return all;
  }
  // The row's largest product and the sum relative to it, in all lanes of the row.
  __device__ float2 join(int i, float size) const {
    float largest = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    float total = top[i] > -INFINITY ? sum[i] * exp2_fast((top[i] - largest) * size) : sum[i];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    return {largest, total};
  }
};

// Of a warp's rows a lane looks after one, lane / 4 of the eight in group lane % 4.
static_assert(kWarpRows == 32);
__device__ int lane_row() { return threadIdx.x % 4 * 8 + threadIdx.x % 32 / 4; }

// A warp's queries, of which the lane knows the item of its own row.
template <int D>
__device__ void fetch_queries(Tile<D> to, const Top1ChunkForward& p, int b, int kv, int item) {
  const int lane = threadIdx.x % 32, h = kv * int(p.heads / p.kv_heads) + item / int(p.time) / int(p.shortlist);
  const bf16* mine = row_of<D>(p.q, b, item % int(p.time), h);
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    const auto from = reinterpret_cast<const bf16*>(
        __shfl_sync(~0u, reinterpret_cast<unsigned long long>(mine), lane / 4 * 4 + part));
#pragma unroll
    for (int vector = lane % 4; vector < D / 8; vector += 4)
      copy_async(to.at(part * 8 + lane / 4, vector), from + vector * 8, true);
  }
}

// Products of the tiles of queries with kKeys keys from `key` on.
template <int D>
__device__ void score_keys(float (&s)[kTiles][kKeys / 8][4], const uint32_t (&q)[kTiles][D / 16][4], Tile<D> keys,
                           int key) {
#pragma unroll
  for (int kk = 0; kk < D / 16; ++kk)
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      uint32_t k[4];
      load_b(k, keys, key + n * 16, kk * 2);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) multiply_add(s[tile][2 * n], s[tile][2 * n + 1], q[tile][kk], k);
    }
}

// Exact scores of the pairs of a segment: a warp takes kWarpRows at a time, the next on their way.
template <int D>
__global__ void __launch_bounds__(kWarps * 32, D == 64 ? 4 : 2)
    pair_kernel(Top1ChunkForward p, ShortlistScratch scratch, int padded) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Lists& lists = scratch.lists;
  const int kv_heads = int(p.kv_heads), heads = int(p.batch) * kv_heads, head = blockIdx.x % heads;
  const int b = head / kv_heads, kv = head % kv_heads, chunk = int(p.chunk_size), warp = threadIdx.x / 32;
  const Segment segment = segment_of(lists, heads, blockIdx.x);
  if (segment.chunk < 0 || segment.begin == segment.end) return;
  const Tile<D> keys{reinterpret_cast<bf16*>(memory)};
  auto queries = [&](int stage) { return Tile<D>{keys.data + (padded + (warp * 2 + stage) * kWarpRows) * D}; };
  const int64_t rows = int64_t{head} * lists.items;
  const int* order = lists.order + rows;
  // Of 0 a number that makes every score 0 and leaves what does not count at −∞.
  const float scale = p.scale == 0 ? 1e-30f : float(p.scale) * kLog2e, sign = p.scale < 0 ? -1 : 1;
  constexpr int kStep = kWarps * kWarpRows;
  int first = segment.begin + warp * kWarpRows;
  const auto item_of = [&](int first) { return order[min(first + lane_row(), segment.end - 1)]; };
  int item = item_of(first), next = item_of(first + kStep);  // read long before they are needed
  copy_rows(keys, p.k, b, segment.chunk * int64_t{chunk}, kv, chunk, padded);
  fetch_queries(queries(0), p, b, kv, item);
  commit_copies(), wait_copies<0>();
  __syncthreads();
  for (int stage = 0; first < segment.end; first += kStep, stage ^= 1) {
    if (first + kStep < segment.end) fetch_queries(queries(stage ^ 1), p, b, kv, next);
    const int later = item_of(first + 2 * kStep);
    commit_copies(), wait_copies<1>();
    __syncwarp();
    uint32_t q[kTiles][D / 16][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int kk = 0; kk < D / 16; ++kk) load_a(q[tile][kk], queries(stage), tile * 16, kk * 2);
    Running running[kTiles];
    // What is largest among the first keys will do for the others but in rare cases.
    for (bool maximum = false;; maximum = true) {
      for (int key = 0; key < chunk; key += kKeys) {
        float s[kTiles][kKeys / 8][4] = {};
        score_keys(s, q, keys, key);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
          if (maximum || key == 0) running[tile].add<true>(s[tile], scale, sign, chunk - key);
          else running[tile].add<false>(s[tile], scale, sign, chunk - key);
      }
      if (maximum || __all_sync(~0u, running[0].fits() && running[1].fits())) break;
      running[0] = running[1] = {};
    }
    float2 score;  // of the lane's row
#pragma unroll
    for (int i = 0; i < kWarpRows / 8; ++i) {
      const float2 x = running[i / 2].join(i % 2, scale * sign);
      if (threadIdx.x % 4 == i) score = x;
    }
    if (first + lane_row() < segment.end)
      scratch.scores[rows + item] = (score.x > -INFINITY ? score.x * scale * sign : 0) + log2f(score.y);
    item = next, next = later;
    __syncwarp();
  }
}

// The top_k best of each query's shortlist. A thread a query.
__global__ void __launch_bounds__(256) pick_kernel(Top1ChunkForward p, ShortlistScratch scratch) {
  const int64_t row = blockIdx.x * int64_t{256} + threadIdx.x;
  if (row >= p.batch * p.heads * p.time) return;
  const int64_t first = row / p.time * p.shortlist * p.time + row % p.time;
  float before = INFINITY;
  int before_chunk = -1;
  for (int rank = 0; rank < p.top_k; ++rank) {
    float best = -INFINITY;
    int best_chunk = -1;
#pragma unroll 4
    for (int slot = 0; slot < p.shortlist; ++slot) {
      const int chunk = int(scratch.listed[first + slot * p.time]);
      float x = chunk < 0 ? -INFINITY : scratch.scores[first + slot * p.time];
      if (isnan(x)) x = INFINITY;
      const bool left = chunk >= 0 && (x < before || (x == before && chunk > before_chunk));
      const bool better = best_chunk < 0 || x > best || (x == best && chunk < best_chunk);
      if (left && better) best = x, best_chunk = chunk;
    }
    p.selected[row * p.top_k + rank] = best_chunk;
    before = best, before_chunk = best_chunk < 0 ? INT_MAX : best_chunk;
  }
}

int parts(const Top1ChunkForward& p) { return p.rank <= 3 ? 4 : 8; }
int64_t tiles_per_head(const Top1ChunkForward& p) {
  return ceil_div(ceil_div(p.time, p.chunk_size), kTileRows / parts(p));
}
// Slot i of head h as a head of its own.
Top1ChunkForward pairs_of(const Top1ChunkForward& p, const ShortlistScratch& scratch) {
  Top1ChunkForward pairs = p;
  pairs.heads = p.heads * p.shortlist, pairs.top_k = 1, pairs.selected = scratch.listed;
  return pairs;
}

template <int D, int kParts>
void list_chunks(const Top1ChunkForward& p, const ShortlistScratch& scratch, cudaStream_t stream) {
  const int64_t chunks = ceil_div(p.time, p.chunk_size);
  const int tiles = int(tiles_per_head(p)), bytes = int(summary_bytes<D>(p));
  Keyed keyed{1};
  while (int64_t{keyed.mask} < chunks) keyed.mask = keyed.mask * 2 + 1;
  cudaFuncSetAttribute(summary_kernel<D, kParts>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  summary_kernel<D, kParts>
      <<<dim3(unsigned(chunks), unsigned(p.batch * p.kv_heads)), 128, bytes, stream>>>(p, scratch.columns, tiles);
  launch_shared(list_kernel<D, kParts>, unsigned(ceil_div(p.time, kGroups * kRows) * p.batch * p.heads),
                kGroups * 128 + 32, Shared<D, kTileRows>::bytes(kGroups), stream, p, scratch, tiles, keyed);
}

}  // namespace

ShortlistScratch::ShortlistScratch(const Top1ChunkForward& p, Arena& arena)
    : columns(arena.take<bf16>(p.batch * p.kv_heads * tiles_per_head(p) * kTileRows * p.head_dim)),
      listed(arena.take<int64_t>(p.batch * p.heads * p.shortlist * p.time)),
      scores(arena.take<float>(p.batch * p.heads * p.shortlist * p.time)),
      lists(pairs_of(p, *this), arena, kPairRuns) {}

void select_shortlist(const Top1ChunkForward& p, const ShortlistScratch& scratch, cudaStream_t stream) {
  with_head_dim(p.head_dim, [&](auto d) {
    if (parts(p) == 4) list_chunks<d(), 4>(p, scratch, stream);
    else list_chunks<d(), 8>(p, scratch, stream);
    if (p.time > p.chunk_size) {
      sort_queries(pairs_of(p, scratch), scratch.lists, 0, stream);
      launch_shared(pair_kernel<d()>, unsigned(p.batch * p.kv_heads * scratch.lists.segments), kWarps * 32,
                    pair_bytes<d()>(p), stream, p, scratch, padded_chunk(p));
    }
  });
  pick_kernel<<<unsigned(ceil_div(p.batch * p.heads * p.time, 256)), 256, 0, stream>>>(p, scratch);
  check_launch("top1_chunk: shortlist");
}

}  // namespace assay::ops::cuda::top1
