// The two passes of the forward: remote, one block per segment of a chunk's list of queries; local,
// a block a chunk's own queries. A warp goes through 16 queries at a time; the chunk's keys and
// values lie in shared memory.
#include "ops/cuda/attention.cuh"
#include "ops/cuda/softmax.cuh"
#include "ops/top1_chunk/cuda_passes.cuh"

namespace assay::ops::cuda::top1 {
namespace {

// of a block, queries of a warp, keys of one step of the softmax
constexpr int kWarps = 4, kRows = 16, kKeys = 64;

int padded_chunk(const Top1ChunkForward& p) { return int(ceil_div(p.chunk_size, kKeys) * kKeys); }

// Keys and values of a chunk, then two tiles of queries for each warp.
template <int D>
struct ForwardSmem {
  SwizzledTile<D> k, v, first_q;
  __device__ ForwardSmem(int keys, int warp) {
    extern __shared__ __align__(1024) unsigned char memory[];
    k.data = reinterpret_cast<bf16*>(memory);
    v.data = k.data + keys * D;
    first_q.data = v.data + (keys + warp * 2 * kRows) * D;
  }
  __device__ SwizzledTile<D> q(int stage) const { return {first_q.data + stage * kRows * D}; }
};
template <int D>
size_t shared_bytes(const Top1ChunkForward& p) {
  return 2 * (padded_chunk(p) + kWarps * kRows) * D * sizeof(bf16);
}

// What 16 queries have read so far: out = o / row_sum, logsumexp = row_max + log₂ row_sum (base 2).
template <int D>
struct Softmax : OnlineSoftmax {
  float o[D / 8][4] = {};

  // Attends to keys [0, highest) of the tile; row i of the lane to [0, limit[i]), with lowest ≤
  // limit[i] ≤ highest.
  __device__ void attend(const uint32_t (&q)[D / 16][4], SwizzledTile<D> k, SwizzledTile<D> v,
                         const int (&limit)[2], int lowest, int highest, float scale) {
    for (int key = 0; key < highest; key += kKeys) {
      float s[kKeys / 8][4] = {};
#pragma unroll
      for (int kk = 0; kk < D / 16; ++kk)
#pragma unroll
        for (int n = 0; n < kKeys / 16; ++n) {
          uint32_t b[4];
          load_b_nk(b, k, key + n * 16, kk * 2);
          mma_m16n16k16(s[2 * n], s[2 * n + 1], q[kk], b);
        }
      const int column = key + threadIdx.x % 4 * 2;
      const bool all = key + kKeys <= lowest;
      each_element(s, [&](float& x, int n, int e) {
        x = all || column + n * 8 + e % 2 < limit[e / 2] ? x * scale : -INFINITY;
      });
      update(s, o);
      uint32_t p[kKeys / 16][4];
      pack_operand(p, s);
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n)
#pragma unroll
        for (int d = 0; d < D / 16; ++d) {
          uint32_t b[4];
          load_b_kn(b, v, key + n * 16, d * 2);
          mma_m16n16k16(o[2 * d], o[2 * d + 1], p[n], b);
        }
    }
  }

  // Row i joined with what `out` holds of it, whose logsumexp is `before` (base 2; −inf: nothing),
  // and written there; null: no such query.
  __device__ void finish(int i, bf16* out, float* logsumexp, float before) {
    const float sum = quad_sum(row_sum[i]);
    const float top = fmaxf(row_max[i], before), share = ex2_approx(before - top),
                mine = ex2_approx(row_max[i] - top);
    const float total = sum * mine + share;
#pragma unroll
    for (int d = 0; d < D / 32; ++d) {
      add_row32(columns32(o, d), load_row32(out && before > -INFINITY ? out + d * 32 : nullptr), i,
                mine, share);
      store_row32(out ? out + d * 32 : nullptr, columns32(o, d), i, 1 / total);
    }
    if (out && threadIdx.x % 4 == 0) *logsumexp = (top + log2f(total)) * kLn2;
  }
};

// The queries that a block goes through: items of `order`, or (null) those of the chunk itself,
// which see no later key.
struct QueryRange {
  int b, kv, group, time, chunk;
  int first_key, keys;  // keys [first_key, first_key + keys) of the sequence
  int begin, end;
  const int* order;
  int head;      // of all queries when local
  int64_t rows;  // of item 0 (local: of query 0) in logsumexp and selected
  int ranks;     // `out` may hold what the queries read by these
  __device__ int item(int i) const { return order ? order[i] : first_key + i; }
  __device__ int limit(int i) const { return order ? keys : i + 1; }
};
struct Query {
  int row, time, head;  // row: from range.rows on
  __device__ Query(const QueryRange& range, int i)
      : row(range.item(min(i, range.end - 1))), time(row), head(range.head) {
    if (!range.order || range.group == 1) return;
    time = row % range.time;
    head = range.kv * range.group + row / range.time;
  }
};

// A warp's 16 queries from `first` on, to shared memory; `out` on its way.
template <int D>
__device__ void fetch(SwizzledTile<D> to, const Top1ChunkForward& p, const QueryRange& range,
                      int first) {
  const int lane = threadIdx.x % 32;
  if (first < range.end) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * 8 + lane / 4;
      const Query query(range, first + row);
      const bf16* from = head_row<D>(p.q, range.b, query.time, query.head);
#pragma unroll
      for (int vector = lane % 4; vector < D / 8; vector += 4)
        cp_async_16(to.at(row, vector), from + vector * 8, true);
      if (range.ranks > 0 && lane % 4 * 64 < D)
        prefetch_l2(head_row<D>(p.out, range.b, query.time, query.head) + lane % 4 * 64);
    }
  }
  cp_async_commit_group();
}

// Whether one of the ranks [first, end) chose a chunk in this row of `selected`.
__device__ bool has_choice(const int64_t* selected, int first, int end, int own) {
  for (int r = first; r < end; ++r)
    if (valid_choice(selected[r], own) >= 0) return true;
  return false;
}

template <int D>
__device__ void attend(const Top1ChunkForward& p, const QueryRange& range, int padded) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const ForwardSmem<D> shared(padded, warp);
  int first = range.begin + warp * kRows;
  copy_rows(shared.k, p.k, range.b, range.first_key, range.kv, range.keys, padded);
  copy_rows(shared.v, p.v, range.b, range.first_key, range.kv, range.keys, padded);
  fetch<D>(shared.q(0), p, range, first);
  cp_async_wait_group<0>();
  __syncthreads();
  for (int stage = 0; first < range.end; first += kWarps * kRows, stage ^= 1) {
    fetch<D>(shared.q(stage ^ 1), p, range, first + kWarps * kRows);
    cp_async_wait_group<1>();
    __syncwarp();
    const Query queries[2] = {{range, first + lane / 4}, {range, first + lane / 4 + 8}};
    // Read early, whether it counts or not, so that no thread waits for it.
    float* logsumexp[2];
    float before[2] = {};
    int64_t choice[2] = {-1, -1};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = range.rows + queries[i].row;
      logsumexp[i] = static_cast<float*>(p.logsumexp) + row;
      if (range.ranks > 0) {
        before[i] = *logsumexp[i];
        choice[i] = p.selected[row * p.top_k];
      }
    }
    uint32_t q[D / 16][4];
#pragma unroll
    for (int kk = 0; kk < D / 16; ++kk) load_a_mk(q[kk], shared.q(stage), 0, kk * 2);
    Softmax<D> softmax;
    const int limit[2] = {range.limit(first + lane / 4), range.limit(first + lane / 4 + 8)};
    softmax.attend(q, shared.k, shared.v, limit, range.limit(first),
                   min(range.limit(first + kRows - 1), range.keys), float(p.scale) * kLog2e);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool wanted = first + lane / 4 + i * 8 < range.end;
      const int own = queries[i].time / range.chunk;
      const int64_t* choices = p.selected + (range.rows + queries[i].row) * p.top_k;
      const bool begun =
          valid_choice(choice[i], own) >= 0 || has_choice(choices, 1, range.ranks, own);
      softmax.finish(
          i, wanted ? head_row<D>(p.out, range.b, queries[i].time, queries[i].head) : nullptr,
          logsumexp[i], begun ? before[i] * kLog2e : -INFINITY);
    }
    __syncwarp();
  }
}

template <int D>
__global__ void __launch_bounds__(kWarps * 32, D == 64 ? 3 : 2)
    remote_kernel(Top1ChunkForward p, Lists lists, int rank, int padded) {
  const int kv_heads = int(p.kv_heads), heads = int(p.batch) * kv_heads, head = blockIdx.x % heads;
  const Segment segment = segment_of(lists, heads, blockIdx.x);
  if (segment.begin == segment.end) return;
  QueryRange range{head / kv_heads, head % kv_heads, int(p.heads) / kv_heads, int(p.time),
                   int(p.chunk_size)};
  range.first_key = segment.chunk * range.chunk;
  range.keys = range.chunk;
  range.begin = segment.begin;
  range.end = segment.end;
  range.head = range.kv;
  range.ranks = rank;
  range.rows = int64_t{head} * lists.items;
  range.order = lists.order + range.rows;
  attend<D>(p, range, padded);
}

template <int D>
__global__ void __launch_bounds__(kWarps * 32, D == 64 ? 3 : 2)
    local_kernel(Top1ChunkForward p, int padded) {
  const int heads = int(p.heads), group = heads / int(p.kv_heads), head = blockIdx.y % heads;
  QueryRange range{int(blockIdx.y) / heads, head / group, group, int(p.time), int(p.chunk_size)};
  range.first_key = blockIdx.x * range.chunk;
  range.keys = min(range.chunk, range.time - range.first_key);
  range.begin = 0;
  range.end = range.keys;
  range.order = nullptr;
  range.head = head;
  range.ranks = int(p.top_k);
  range.rows = int64_t{blockIdx.y} * range.time;
  attend<D>(p, range, padded);
}

}  // namespace

void remote_pass(const Top1ChunkForward& p, const Lists& lists, int rank, Stream stream) {
  const unsigned blocks = unsigned(p.batch * p.kv_heads * lists.segments);
  with_head_dim(p.head_dim, [&](auto d) {
    launch_kernel(remote_kernel<d()>, blocks, kWarps * 32, shared_bytes<d()>(p), stream, p, lists,
                  rank, padded_chunk(p));
  });
}
void local_pass(const Top1ChunkForward& p, Stream stream) {
  const dim3 blocks(unsigned(ceil_div(p.time, p.chunk_size)), unsigned(p.batch * p.heads));
  with_head_dim(p.head_dim, [&](auto d) {
    launch_kernel(local_kernel<d()>, blocks, kWarps * 32, shared_bytes<d()>(p), stream, p,
                  padded_chunk(p));
  });
}

}  // namespace assay::ops::cuda::top1
