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

// Of keys and values of a chunk, then two tiles of queries for each warp.
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

// A warp's 16 queries from `first` on, to shared memory; `out` on its way.
template <int D>
__device__ void fetch(SwizzledTile<D> to, const Top1ChunkForward& p, const QueryRange& range,
                      int first, bool joins) {
  const int lane = threadIdx.x % 32;
  if (first < range.end) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * 8 + lane / 4;
      const Query query(range, range.item(min(first + row, range.end - 1)));
      const bf16* from = head_row<D>(p.q, range.b, query.time, query.head);
#pragma unroll
      for (int vector = lane % 4; vector < D / 8; vector += 4)
        cp_async_16(to.at(row, vector), from + vector * 8, true);
      if (joins && lane % 4 * 64 < D)
        prefetch_l2(head_row<D>(p.out, range.b, query.time, query.head) + lane % 4 * 64);
    }
  }
  cp_async_commit_group();
}

// The queries of lists, or (local) of each chunk itself, which see no later key. joins: `out` may
// hold what they read before.
template <int D, bool kLocal>
__global__ void __launch_bounds__(kWarps * 32, D == 64 ? 3 : 2)
    attend_kernel(Top1ChunkForward p, Lists lists, bool joins, int padded) {
  const int parts = int(kLocal ? p.heads : p.kv_heads);
  if (!kLocal) griddep_launch_dependents();
  const QueryRange range(p, lists, kLocal, parts, blockIdx.x / (int(p.batch) * parts), 0,
                         int(p.chunk_size));
  if (range.keys == 0) return;
  const auto limit_of = [&](int i) { return kLocal ? i + 1 : range.keys; };
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  extern __shared__ __align__(1024) unsigned char memory[];
  const SwizzledTile<D> k{reinterpret_cast<bf16*>(memory)}, v{k.data + padded * D};
  const auto queries = [&](int stage) {
    return SwizzledTile<D>{v.data + (padded + (warp * 2 + stage) * kRows) * D};
  };
  int first = range.begin + warp * kRows;
  copy_rows(k, p.k, range.b, range.first_key, range.kv, range.keys, padded);
  copy_rows(v, p.v, range.b, range.first_key, range.kv, range.keys, padded);
  fetch<D>(queries(0), p, range, first, joins);
  if (kLocal) griddep_wait();  // for `out` and logsumexp
  cp_async_wait_group<0>();
  __syncthreads();
  for (int stage = 0; first < range.end; first += kWarps * kRows, stage ^= 1) {
    fetch<D>(queries(stage ^ 1), p, range, first + kWarps * kRows, joins);
    cp_async_wait_group<1>();
    __syncwarp();
    // Read early, so that no thread waits for it.
    int items[2];
    float* logsumexp[2];
    float before[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      items[i] = range.item(min(first + lane / 4 + i * 8, range.end - 1));
      logsumexp[i] = static_cast<float*>(p.logsumexp) + range.row(items[i]);
      before[i] = joins ? *logsumexp[i] : __uint_as_float(kNothingRead);
    }
    uint32_t q[D / 16][4];
#pragma unroll
    for (int kk = 0; kk < D / 16; ++kk) load_a_mk(q[kk], queries(stage), 0, kk * 2);
    Softmax<D> softmax;
    const int limit[2] = {limit_of(first + lane / 4), limit_of(first + lane / 4 + 8)};
    softmax.attend(q, k, v, limit, limit_of(first), min(limit_of(first + kRows - 1), range.keys),
                   float(p.scale) * kLog2e);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Query query(range, items[i]);
      const bool wanted = first + lane / 4 + i * 8 < range.end;
      softmax.finish(i, wanted ? head_row<D>(p.out, range.b, query.time, query.head) : nullptr,
                     logsumexp[i],
                     __float_as_uint(before[i]) == kNothingRead ? -INFINITY : before[i] * kLog2e);
    }
    __syncwarp();
  }
}

}  // namespace

void attend(const Top1ChunkForward& p, const Lists& lists, bool local, bool joins, Stream stream) {
  const int64_t blocks = p.batch * (local ? p.heads * lists.chunks : p.kv_heads * lists.segments);
  with_head_dim(p.head_dim, [&](auto d) {
    const unsigned grid = unsigned(blocks), threads = kWarps * 32;
    const size_t bytes = shared_bytes<d()>(p);
    // The remote pass is the kernel before: the keys, values and queries were there when it began.
    if (local && joins)
      launch_pdl(attend_kernel<d(), true>, grid, threads, bytes, stream, p, lists, joins,
                 padded_chunk(p));
    else
      launch_kernel(local ? attend_kernel<d(), true> : attend_kernel<d(), false>, grid, threads,
                    bytes, stream, p, lists, joins, padded_chunk(p));
  });
}

}  // namespace assay::ops::cuda::top1
