// The gradients: a block holds up to 128 keys and values of a chunk and streams the queries that
// read them, the list of those that chose the chunk or its own. A warp owns 16 keys; with keys as
// rows, the exponentials come out of the tensor cores as the operands of dv and dk. dS goes through
// shared memory once, for dq.
#include "ops/cuda/attention.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/wgmma.cuh"
#include "ops/top1_chunk/cuda_passes.cuh"

namespace assay::ops::cuda::top1 {
namespace {

// queries of a step, and of the part of it that is in registers at a time
constexpr int kTile = 64, kPart = 32;

int block_keys(const Top1ChunkForward& p) { return p.chunk_size <= 64 ? 64 : 128; }

// delta = dout · out. One quad of lanes per row.
template <int D>
__global__ void __launch_bounds__(256) delta_kernel(Top1ChunkBackward bwd, float* delta) {
  const int heads = int(bwd.forward.heads), lane = threadIdx.x % 4;
  const int64_t i = (blockIdx.x * int64_t{256} + threadIdx.x) / 4, time = bwd.forward.time;
  const bool wanted = i < bwd.forward.batch * time * heads;
  const int64_t b = i / (time * heads), t = i / heads % time, h = i % heads;
  float sum = 0;
  if (wanted) {
    const auto *out = reinterpret_cast<const Vec<bf16, 8>*>(head_row<D>(bwd.forward.out, b, t, h)),
               *dout = reinterpret_cast<const Vec<bf16, 8>*>(head_row<D>(bwd.dout, b, t, h));
#pragma unroll
    for (int j = lane; j < D / 8; j += 4) {
      const Vec<bf16, 8> x = out[j], y = dout[j];
#pragma unroll
      for (int e = 0; e < 8; ++e) sum += to_compute(x[e]) * to_compute(y[e]);
    }
  }
  sum = quad_sum(sum);
  if (wanted && lane == 0) delta[(b * heads + h) * time + t] = sum;
}

template <int kKeys>
constexpr int kRowsOf = 2 * kTile / kKeys;  // rows of a tile that a thread fetches its part of

// What a query brings in addition to its rows; zeros where there is none, which then
// adds nothing. `limit`:
// it reads the block's keys [0, limit).
struct RowStats {
  float logsumexp[kTile], delta[kTile];
  int limit[kTile], time[kTile], head[kTile];
};

template <int D, int kKeys>
struct BackwardSmem {
  WgmmaTile<D, kKeys> k, v;
  WgmmaTile<kTile, kKeys> ds;  // [keys, queries]
  bf16* queries;               // rows of q, then of dout, of two stages
  RowStats* two_stats;
  static constexpr size_t kBytes = (2 * kKeys + 4 * kTile) * D * sizeof(bf16) +
                                   kKeys * kTile * sizeof(bf16) + 2 * sizeof(RowStats);
  __device__ BackwardSmem() {
    extern __shared__ __align__(1024) unsigned char memory[];
    k.data = reinterpret_cast<bf16*>(memory);
    v.data = k.data + kKeys * D;
    ds.data = v.data + kKeys * D;
    queries = ds.data + kKeys * kTile;
    two_stats = reinterpret_cast<RowStats*>(queries + 4 * kTile * D);
  }
  __device__ WgmmaTile<D, kTile> q(int stage) const { return {queries + 2 * stage * kTile * D}; }
  __device__ WgmmaTile<D, kTile> dout(int stage) const {
    return {queries + (2 * stage + 1) * kTile * D};
  }
  __device__ RowStats& stats(int stage) const { return two_stats[stage]; }
};

// 64 queries from `first` on: their rows of q and dout, and their stats. Vec4 lanes a row.
// `item`: of the lane's rows; then of those 64 further on, which are read here so that no thread
// waits for them then.
template <int D, int kKeys>
__device__ void fetch(const Top1ChunkBackward& bwd, const QueryRange& range,
                      const BackwardSmem<D, kKeys>& shared, const float* delta, int first,
                      int stage, int (&item)[kRowsOf<kKeys>], bool add_dq) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < kRowsOf<kKeys>; ++i) {
    const int row = threadIdx.x / 4 + i * kKeys / 2;
    const bool wanted = first + row < range.end;
    const auto [t, h] = Query(range, item[i]);
    const bf16 *from_q = head_row<D>(bwd.forward.q, range.b, t, h),
               *from_dout = head_row<D>(bwd.dout, range.b, t, h);
#pragma unroll
    for (int vector = lane; vector < D / 8; vector += 4) {
      cp_async_16(shared.q(stage).at(row, vector), from_q + vector * 8, wanted);
      cp_async_16(shared.dout(stage).at(row, vector), from_dout + vector * 8, wanted);
    }
    RowStats& stats = shared.stats(stage);
    const int64_t at = range.rows + item[i];
    if (lane == 0)
      cp_async_4(stats.logsumexp + row, static_cast<const float*>(bwd.forward.logsumexp) + at,
                 wanted);
    if (lane == 1) cp_async_4(stats.delta + row, delta + at, wanted);
    if (lane == 2) stats.limit[row] = range.order ? range.keys : t - range.first_key + 1;
    if (lane == 3) {
      stats.time[row] = t;
      stats.head[row] = h;
    }
    if (add_dq && lane * 64 < D) prefetch_l2(head_row<D>(bwd.dq, range.b, t, h) + lane * 64);
    item[i] = range.item(min(first + kTile + row, range.end - 1));
  }
  cp_async_commit_group();
}

// Sums of a warpgroup's 64 keys.
template <int D, int kKeys>
struct KeyGradients {
  float dk[D / 8][4] = {}, dv[D / 8][4] = {};

  // Adds a tile of queries, a part at a time. Leaves dS in shared memory.
  __device__ void add(const BackwardSmem<D, kKeys>& shared, int stage, float scale, bool all) {
#pragma unroll 1
    for (int part = 0; part < kTile; part += kPart) {
      float p[kPart / 8][4], ds[kPart / 8][4];
      uint32_t weights[kPart / 16][4], gradients[kPart / 16][4];
      wgmma_fence();
      scores(p, shared.k, shared.q(stage), part);
      wgmma_commit_group();
      scores(ds, shared.v, shared.dout(stage), part);
      wgmma_commit_group();
      wgmma_wait_group<1>(p);
      exponentials(p, shared.stats(stage), part, scale, all);
      wgmma_wait_group<0>(ds);
      score_gradients(ds, p, shared.stats(stage), part);
      pack_operand(weights, p);
      pack_operand(gradients, ds);
      store(shared.ds, gradients, part);
      wgmma_fence();
      accumulate(dv, weights, shared.dout(stage), part);
      accumulate(dk, gradients, shared.q(stage), part);
      wgmma_commit_group();
      wgmma_wait_group<0>(dk, dv);
    }
  }
  // s [keys, queries] = keys · queriesᵀ
  static __device__ void scores(float (&s)[kPart / 8][4], WgmmaTile<D, kKeys> keys,
                                WgmmaTile<D, kTile> queries, int part) {
    const WgmmaDescriptor a =
        warp_uniform(keys.rows() + threadIdx.x / 128 * WgmmaTile<D, kKeys>::rows_at(64, 0));
    const WgmmaDescriptor b = warp_uniform(queries.rows());
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
      wgmma<kPart, false, false>(s, a + WgmmaTile<D, kKeys>::rows_at(0, k),
                                 b + WgmmaTile<D, kTile>::rows_at(part, k), k > 0);
  }
  static __device__ void exponentials(float (&s)[kPart / 8][4], const RowStats& stats, int part,
                                      float scale, bool all) {
    const int lane = threadIdx.x % 32, key = threadIdx.x / 32 * 16 + lane / 4,
              query = part + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kPart / 8; ++n) {
      const float2 logsumexp = *reinterpret_cast<const float2*>(stats.logsumexp + query + n * 8);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        s[n][e] = ex2_approx(fmaf(s[n][e], scale, -kLog2e * (e % 2 ? logsumexp.y : logsumexp.x)));
    }
    if (all) return;
#pragma unroll
    for (int n = 0; n < kPart / 8; ++n) {
      const int2 limit = *reinterpret_cast<const int2*>(stats.limit + query + n * 8);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        s[n][e] = key + e / 2 * 8 < (e % 2 ? limit.y : limit.x) ? s[n][e] : 0;
    }
  }
  // dP becomes dS / scale = P (dP − delta)
  static __device__ void score_gradients(float (&s)[kPart / 8][4], const float (&p)[kPart / 8][4],
                                         const RowStats& stats, int part) {
#pragma unroll
    for (int n = 0; n < kPart / 8; ++n) {
      const float2 delta =
          *reinterpret_cast<const float2*>(stats.delta + part + n * 8 + threadIdx.x % 4 * 2);
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = p[n][e] * (s[n][e] - (e % 2 ? delta.y : delta.x));
    }
  }
  static __device__ void store(WgmmaTile<kTile, kKeys> ds, const uint32_t (&a)[kPart / 16][4],
                               int part) {
    const int lane = threadIdx.x % 32, key = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < kPart / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        reinterpret_cast<uint32_t*>(ds.at(key + half * 8, part / 8 + n))[lane % 4] =
            a[n / 2][n % 2 * 2 + half];
  }
  // sum [keys, D] += weights [keys, queries] · rows
  static __device__ void accumulate(float (&sum)[D / 8][4],
                                    const uint32_t (&weights)[kPart / 16][4],
                                    WgmmaTile<D, kTile> rows, int part) {
    using P = WgmmaTile<D, kTile>;
    const WgmmaDescriptor b = warp_uniform(rows.columns());
    wgmma_rows<D>(sum, weights,
                  [&](int column, int k) { return b + P::columns_at(column, part / 16 + k); });
  }
};

// dq [queries, kColumns from `column` on] of a tile: dSᵀ · K. Adds to what is there, or writes.
// Ends all products.
template <int D, int kKeys, int kColumns>
__device__ void query_gradients(const Top1ChunkBackward& bwd, const QueryRange& range,
                                const BackwardSmem<D, kKeys>& shared, int first, int stage,
                                int column, bool add) {
  const RowStats& stats = shared.stats(stage);
  bf16* rows[2];
  uint4 before[2][kColumns / 32];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + half * 8;
    rows[half] = first + i < range.end
                     ? head_row<D>(bwd.dq, range.b, stats.time[i], stats.head[i]) + column
                     : nullptr;
#pragma unroll
    for (int d = 0; d < kColumns / 32; ++d)
      before[half][d] = load_row32(add && rows[half] ? rows[half] + d * 32 : nullptr);
  }
  float dq[kColumns / 8][4];
  const WgmmaDescriptor a = warp_uniform(shared.ds.columns());
  const WgmmaDescriptor b =
      warp_uniform(shared.k.columns() + WgmmaTile<D, kKeys>::columns_at(column, 0));
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k)
    wgmma<kColumns, true, true>(dq, a + WgmmaTile<kTile, kKeys>::columns_at(0, k),
                                b + WgmmaTile<D, kKeys>::columns_at(0, k), k > 0);
  wgmma_commit_group();
  wgmma_wait_group<0>(dq);
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int d = 0; d < kColumns / 32; ++d) {
      add_row32(columns32(dq, d), before[half][d], half, float(bwd.forward.scale), 1);
      store_row32(rows[half] ? rows[half] + d * 32 : nullptr, columns32(dq, d), half, 1);
    }
}

template <int D, int kKeys>
__device__ void write_rows(const View& to, const QueryRange& range, float (&sum)[D / 8][4],
                           float factor, bool add) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + half * 8;
    bf16* row =
        key < range.keys ? head_row<D>(to, range.b, range.first_key + key, range.kv) : nullptr;
#pragma unroll
    for (int d = 0; d < D / 32; ++d) {
      add_row32(columns32(sum, d), load_row32(add && row ? row + d * 32 : nullptr), half, factor,
                1);
      store_row32(row ? row + d * 32 : nullptr, columns32(sum, d), half, 1);
    }
  }
}

template <int D>
__device__ void write_partial(float* to, const float (&sum)[D / 8][4], float factor) {
  const int lane = threadIdx.x % 32, key = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int d = 0; d < D / 8; ++d)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(to + (key + half * 8) * D + d * 8 + lane % 4 * 2) =
          make_float2(sum[d][2 * half] * factor, sum[d][2 * half + 1] * factor);
}

// The rows of the block's keys, on their way to the L2 cache.
template <int D>
__device__ void prefetch_rows(const View& x, const QueryRange& range) {
  constexpr int kLines = (D + 63) / 64;
  for (int i = threadIdx.x; i < range.keys * kLines; i += blockDim.x)
    prefetch_l2(head_row<D>(x, range.b, range.first_key + i / kLines, range.kv) + i % kLines * 64);
}

// Local: block i goes through chunk i / heads of key head i % heads; else through segment i / heads
// of its lists.
template <int D, int kKeys>
__global__ void __launch_bounds__(kKeys * 2, D == 64 ? 256 / kKeys : 1)
    gradient_kernel(Top1ChunkBackward bwd, const float* delta, int key_offset, bool local,
                    Lists lists, float* partial) {
  const Top1ChunkForward& p = bwd.forward;
  const QueryRange range(p, lists, local, int(p.kv_heads), key_offset, kKeys);
  if (range.keys == 0) return;
  // Segments beyond a chunk's first are counted from 0 over all chunks.
  const int heads = int(p.batch * p.kv_heads), number = blockIdx.x / heads,
            chunk = range.first_key / int(p.chunk_size);
  const int64_t beyond =
      int64_t{blockIdx.x % heads} * (lists.segments - lists.chunks) + number - chunk - 1;
  partial = range.segment > 0 ? partial + beyond * 2 * kKeys * D : nullptr;
  const bool add_dq = !local || key_offset > 0, add_dk = !local;
  const BackwardSmem<D, kKeys> shared;
  copy_rows(shared.k, p.k, range.b, range.first_key, range.kv, range.keys, kKeys);
  copy_rows(shared.v, p.v, range.b, range.first_key, range.kv, range.keys, kKeys);
  int item[kRowsOf<kKeys>];
#pragma unroll
  for (int i = 0; i < kRowsOf<kKeys>; ++i)
    item[i] = range.item(min(range.begin + int(threadIdx.x) / 4 + i * kKeys / 2, range.end - 1));
  fetch<D, kKeys>(bwd, range, shared, delta, range.begin, 0, item, add_dq);
  if (add_dk && !partial) {
    prefetch_rows<D>(bwd.dk, range);
    prefetch_rows<D>(bwd.dv, range);
  }
  KeyGradients<D, kKeys> sums;
  const bool all = range.order && range.keys == kKeys;
  for (int first = range.begin, stage = 0; first < range.end; first += kTile, stage ^= 1) {
    cp_async_wait_group<0>();
    fence_proxy_async();
    __syncthreads();
    if (first + kTile < range.end)
      fetch<D, kKeys>(bwd, range, shared, delta, first + kTile, stage ^ 1, item, add_dq);
    sums.add(shared, stage, float(p.scale) * kLog2e, all);
    fence_proxy_async();
    __syncthreads();
    // a warpgroup after the other takes so many columns
    constexpr int kColumns = D == 128 || (D == 64 && kKeys == 64) ? 64 : 32;
#pragma unroll
    for (int i = 0; i < D; i += kKeys / 64 * kColumns)
      if (const int column = i + threadIdx.x / 128 % (kKeys / 64) * kColumns; column < D)
        query_gradients<D, kKeys, kColumns>(bwd, range, shared, first, stage, column, add_dq);
  }
  const float scale = float(p.scale);
  if (partial) {
    write_partial<D>(partial, sums.dk, scale);
    write_partial<D>(partial + kKeys * D, sums.dv, 1);
  } else {
    write_rows<D, kKeys>(bwd.dk, range, sums.dk, scale, add_dk);
    write_rows<D, kKeys>(bwd.dv, range, sums.dv, 1, add_dk);
  }
}

// Adds the partial sums of a chunk's later segments to its dk and dv, in their order. Vec4 numbers
// a thread at a time.
template <int D, int kKeys>
__global__ void __launch_bounds__(256)
    join_kernel(Top1ChunkBackward bwd, int key_offset, Lists lists, const float* partial) {
  const Top1ChunkForward& p = bwd.forward;
  const int64_t head = blockIdx.y;
  const int begin = lists.begin(head, blockIdx.x), end = lists.begin(head, blockIdx.x + 1);
  const int count = (end - begin - 1) / kSegment, keys = min(kKeys, int(p.chunk_size) - key_offset);
  if (count <= 0) return;
  partial += (head * (lists.segments - lists.chunks) + begin / kSegment) * 2 * kKeys * D;
  const int64_t t = blockIdx.x * p.chunk_size + key_offset;
  for (int i = blockIdx.z * 256 + threadIdx.x; i < 2 * keys * D / 4; i += 256 * gridDim.z) {
    const int key = i / (D / 4) % keys, column = i % (D / 4) * 4, which = i / (keys * D / 4);
    bf16* to = head_row<D>(which ? bwd.dv : bwd.dk, head / p.kv_heads, t + key, head % p.kv_heads) +
               column;
    uint2& pairs = *reinterpret_cast<uint2*>(to);
    const float2 low = unpack_bf16x2(pairs.x), high = unpack_bf16x2(pairs.y);
    float4 sum = make_float4(low.x, low.y, high.x, high.y);
#pragma unroll 4
    for (int s = 0; s < count; ++s) {
      const float4 x = *reinterpret_cast<const float4*>(
          partial + ((int64_t{s} * 2 + which) * kKeys + key) * D + column);
      sum.x += x.x;
      sum.y += x.y;
      sum.z += x.z;
      sum.w += x.w;
    }
    pairs = make_uint2(pack_bf16x2(sum.x, sum.y), pack_bf16x2(sum.z, sum.w));
  }
}

}  // namespace

GradientWorkspace::GradientWorkspace(const Top1ChunkBackward& bwd, const Lists& lists,
                                     WorkspaceArena& arena) {
  const Top1ChunkForward& p = bwd.forward;
  delta = arena.take<float>(p.batch * p.heads * p.time);
  const int64_t segments = p.batch * p.kv_heads * (lists.segments - lists.chunks);
  partial = arena.take<float>(segments * 2 * block_keys(p) * p.head_dim);
}

void chunk_gradients(const Top1ChunkBackward& bwd, const GradientWorkspace& scratch,
                     const Lists& lists, bool local, Stream stream) {
  const Top1ChunkForward& p = bwd.forward;
  const unsigned heads = unsigned(p.batch * p.kv_heads),
                 blocks = heads * unsigned(local ? lists.chunks : lists.segments);
  with_head_dim(p.head_dim, [&](auto d) {
    if (local)
      launch_threads(delta_kernel<d()>, p.batch * p.time * p.heads * 4, 256, stream, bwd,
                     scratch.delta);
    with_constant<64, 128>(block_keys(p), [&](auto keys) {
      for (int offset = 0; offset < p.chunk_size; offset += keys()) {
        launch_kernel(gradient_kernel<d(), keys()>, blocks, keys() * 2,
                      BackwardSmem<d(), keys()>::kBytes, stream, bwd, scratch.delta, offset, local,
                      lists, scratch.partial);
        if (local) continue;
        launch_kernel(join_kernel<d(), keys()>, dim3(lists.chunks, heads, 4), 256, 0, stream, bwd,
                      offset, lists, scratch.partial);
      }
    });
  });
}

}  // namespace assay::ops::cuda::top1
