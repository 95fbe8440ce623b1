// The gradients: a block holds up to 128 keys and values of a chunk and streams the queries that
// read them: first the chunk's own, then those that chose the chunk. A warp owns 16 keys; with keys
// as rows, the exponentials come out of the tensor cores as the operands of dv and dk. dS goes
// through shared memory once, for dq.
#include "ops/attention/top1_chunk/choose/cuda_queries.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/wgmma.cuh"

namespace assay::ops::cuda::top1 {
namespace {

constexpr int kPart = 32;  // queries of a tile whose scores are in registers at a time

int block_keys(const Top1ChunkForward& args) { return args.chunk_size <= 64 ? 64 : 128; }

template <int kKeys>
constexpr int kRowsOf = 2 * kTile / kKeys;  // rows of a tile that a thread fetches its part of

// The statistics of a tile's queries. A row without a query has zeros in shift and delta, which add
// nothing, and a time of -1. `limit`: the query reads the block's keys [0, limit).
struct RowStats {
  // shift: −logsumexp in base 2
  float shift[kTile];
  float delta[kTile];
  int limit[kTile];
  int time[kTile];
  int head[kTile];
};

template <int D, int kKeys>
struct BackwardSmem {
  WgmmaTile<D, kKeys> k;
  WgmmaTile<D, kKeys> v;
  WgmmaTile<kTile, kKeys> ds;  // [keys, queries]
  bf16* queries;               // rows of q, then of dout, of two stages
  // Rows of out. A thread reads only what it copied, before it copies the next.
  WgmmaTile<D, kTile> out;
  RowStats* two_stats;
  static constexpr size_t kBytes = (2 * kKeys + 5 * kTile) * D * sizeof(bf16) +
                                   kKeys * kTile * sizeof(bf16) + 2 * sizeof(RowStats);
  __device__ BackwardSmem() {
    extern __shared__ __align__(1024) unsigned char memory[];
    k.data = reinterpret_cast<bf16*>(memory);
    v.data = k.data + kKeys * D;
    ds.data = v.data + kKeys * D;
    queries = ds.data + kKeys * kTile;
    out.data = queries + 4 * kTile * D;
    two_stats = reinterpret_cast<RowStats*>(out.data + kTile * D);
  }
  __device__ WgmmaTile<D, kTile> q(int stage) const { return {queries + 2 * stage * kTile * D}; }
  __device__ WgmmaTile<D, kTile> dout(int stage) const {
    return {queries + (2 * stage + 1) * kTile * D};
  }
  __device__ RowStats& stats(int stage) const { return two_stats[stage]; }
};

// The tile's row that the thread's quad copies, one of kRowsOf.
template <int kKeys>
__device__ int row_of(int i) {
  return threadIdx.x / 4 + i * kKeys / 2;
}

// A tile's rows of q, dout and out, and its stats but delta. `item`: of the quad's rows; then of
// those of the next tile, which are read here so that no thread waits for them then.
template <int D, int kKeys>
__device__ void fetch(const Top1ChunkBackward& bwd, const QueryTiles& all, int tile,
                      const BackwardSmem<D, kKeys>& shared, int stage, int (&item)[kRowsOf<kKeys>],
                      bool add_own) {
  const int lane = threadIdx.x % 4;
  const bool listed = all.listed(tile);
  RowStats& stats = shared.stats(stage);
#pragma unroll
  for (int i = 0; i < kRowsOf<kKeys>; ++i) {
    const int row = row_of<kKeys>(i);
    const bool wanted = all.first(tile) + row < all.end(tile);
    const auto [t, h] = Query(all, item[i]);
    const bf16* from_q = head_row<D>(bwd.forward.q, all.b, t, h);
    const bf16* from_dout = head_row<D>(bwd.dout, all.b, t, h);
    const bf16* from_out = head_row<D>(bwd.forward.out, all.b, t, h);
#pragma unroll
    for (int vector = lane; vector < D / 8; vector += 4) {
      cp_async_16(shared.q(stage).at(row, vector), from_q + vector * 8, wanted);
      cp_async_16(shared.dout(stage).at(row, vector), from_dout + vector * 8, wanted);
      cp_async_16(shared.out.at(row, vector), from_out + vector * 8, wanted);
    }
    if (lane == 0)
      cp_async_4(stats.shift + row,
                 static_cast<const float*>(bwd.forward.logsumexp) + all.row(item[i]), wanted);
    if (lane == 1) stats.head[row] = h;
    if (lane == 2) stats.limit[row] = listed ? all.keys : t - all.first_key + 1;
    if (lane == 3) stats.time[row] = wanted ? t : -1;
    if ((listed || add_own) && lane * 64 < D)
      prefetch_l2(head_row<D>(bwd.dq, all.b, t, h) + lane * 64);
  }
  cp_async_commit_group();
  if (tile + 1 == all.tiles) return;
#pragma unroll
  for (int i = 0; i < kRowsOf<kKeys>; ++i) item[i] = all.item(tile + 1, row_of<kKeys>(i));
}

// delta = dout · out of the rows that the quad has copied. The copied logsumexp becomes the shift.
template <int D, int kKeys>
__device__ void compute_delta(const BackwardSmem<D, kKeys>& shared, int stage) {
#pragma unroll
  for (int i = 0; i < kRowsOf<kKeys>; ++i) {
    const int row = row_of<kKeys>(i);
    float sum = 0;
#pragma unroll
    for (int vector = threadIdx.x % 4; vector < D / 8; vector += 4) {
      const auto x = *reinterpret_cast<const Vec<bf16, 8>*>(shared.out.at(row, vector));
      const auto y = *reinterpret_cast<const Vec<bf16, 8>*>(shared.dout(stage).at(row, vector));
#pragma unroll
      for (int e = 0; e < 8; ++e) sum += to_compute(x[e]) * to_compute(y[e]);
    }
    sum = quad_sum(sum);
    if (threadIdx.x % 4 > 0) continue;
    shared.stats(stage).delta[row] = sum;
    shared.stats(stage).shift[row] *= -kLog2e;
  }
}

// Sums of a warpgroup's 64 keys.
template <int D, int kKeys>
struct KeyGradients {
  float dk[D / 8][4] = {};
  float dv[D / 8][4] = {};

  // Adds a tile of queries, a part at a time. Leaves dS in shared memory.
  __device__ void add(const BackwardSmem<D, kKeys>& shared, int stage, float scale, bool all) {
#pragma unroll
    for (int part = 0; part < kTile; part += kPart) {
      float p[kPart / 8][4];
      float ds[kPart / 8][4];
      uint32_t weights[kPart / 16][4];
      uint32_t gradients[kPart / 16][4];
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
#pragma unroll
      for (int n = 0; n < kPart / 16; ++n)
        store_a_mk(shared.ds, threadIdx.x / 32 * 16, part / 8 + 2 * n, gradients[n]);
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
    const int lane = threadIdx.x % 32;
    const int key = threadIdx.x / 32 * 16 + lane / 4;
    const int query = part + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kPart / 8; ++n) {
      const float2 shift = *reinterpret_cast<const float2*>(stats.shift + query + n * 8);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        s[n][e] = ex2_approx(fmaf(s[n][e], scale, e % 2 ? shift.y : shift.x));
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
__device__ void query_gradients(const Top1ChunkBackward& bwd, int batch,
                                const BackwardSmem<D, kKeys>& shared, int stage, int column,
                                bool add) {
  const RowStats& stats = shared.stats(stage);
  const int warp_row = threadIdx.x % 128 / 32 * 16;
  bf16* rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = warp_row + threadIdx.x % 32 / 4 + half * 8;
    rows[half] = stats.time[i] < 0
                     ? nullptr
                     : head_row<D>(bwd.dq, batch, stats.time[i], stats.head[i]) + column;
  }
  uint32_t before[2][kColumns / 8] = {};
  if (add) load_lane_rows(before, rows);
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
  const float scale = float(bwd.forward.scale);
  add_lane_rows(dq, before, {scale, scale}, {1, 1});
  store_lane_rows(shared.q(stage), warp_row, column / 8, dq, rows);  // whose queries have been used
}

// Through a tile that nobody reads any more.
template <int D, int kKeys>
__device__ void write_rows(WgmmaTile<D, kKeys> tile, const View& to, const QueryTiles& all,
                           float (&sum)[D / 8][4], float factor, bool add) {
  const int warp_row = threadIdx.x / 32 * 16;
  bf16* rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = warp_row + threadIdx.x % 32 / 4 + half * 8;
    rows[half] = key < all.keys ? head_row<D>(to, all.b, all.first_key + key, all.kv) : nullptr;
  }
  uint32_t before[2][D / 8] = {};
  if (add) load_lane_rows(before, rows);
  add_lane_rows(sum, before, {factor, factor}, {1, 1});
  store_lane_rows(tile, warp_row, 0, sum, rows);
}

template <int D>
__device__ void write_partial(float* to, const float (&sum)[D / 8][4], float factor) {
  const int lane = threadIdx.x % 32;
  const int key = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int d = 0; d < D / 8; ++d)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(to + (key + half * 8) * D + d * 8 + lane % 4 * 2) =
          make_float2(sum[d][2 * half] * factor, sum[d][2 * half + 1] * factor);
}

// Blocks as QueryTiles says.
template <int D, int kKeys>
__global__ void __launch_bounds__(kKeys * 2, D == 64 ? 256 / kKeys : 1)
    gradient_kernel(Top1ChunkBackward bwd, int key_offset, bool own, bool chosen, Lists lists,
                    float* partial, int* finished) {
  const Top1ChunkForward& args = bwd.forward;
  const QueryTiles all(args, lists, own, chosen, key_offset, kKeys);
  const OwnQueries own_queries(lists, all.part, finished);
  const int end_keys = key_offset + kKeys;
  const auto finish_own = [&] {
    if (own && !all.later && threadIdx.x == 0) own_queries.finish(all.number, end_keys);
  };
  if (all.keys == 0) return finish_own();
  const BackwardSmem<D, kKeys> shared;
  copy_rows(shared.k, args.k, all.b, all.first_key, all.kv, all.keys, kKeys);
  copy_rows(shared.v, args.v, all.b, all.first_key, all.kv, all.keys, kKeys);
  int item[kRowsOf<kKeys>];
#pragma unroll
  for (int i = 0; i < kRowsOf<kKeys>; ++i) item[i] = all.item(0, row_of<kKeys>(i));
  fetch<D, kKeys>(bwd, all, 0, shared, 0, item, key_offset > 0);
  KeyGradients<D, kKeys> sums;
  for (int tile = 0, stage = 0; tile < all.tiles; ++tile, stage ^= 1) {
    const bool listed = all.listed(tile);
    cp_async_wait_group<0>();
    compute_delta(shared, stage);
    fence_proxy_async();
    __syncthreads();
    if (tile + 1 < all.tiles)
      fetch<D, kKeys>(bwd, all, tile + 1, shared, stage ^ 1, item, key_offset > 0);
    if (tile == all.own_tiles) finish_own();
    sums.add(shared, stage, float(args.scale) * kLog2e, listed && all.keys == kKeys);
    if (own && tile == all.own_tiles) own_queries.wait_for(all, int(args.chunk_size), end_keys);
    fence_proxy_async();
    __syncthreads();
    // a warpgroup after the other takes so many columns
    constexpr int kColumns = D == 128 || (D == 64 && kKeys == 64) ? 64 : 32;
#pragma unroll
    for (int i = 0; i < D; i += kKeys / 64 * kColumns)
      if (const int column = i + threadIdx.x / 128 % (kKeys / 64) * kColumns; column < D)
        query_gradients<D, kKeys, kColumns>(bwd, all.b, shared, stage, column,
                                            listed || key_offset > 0);
  }
  __syncthreads();
  if (all.tiles == all.own_tiles) finish_own();
  const float scale = float(args.scale);
  if (all.later) {
    const int64_t segments = lists.segments - lists.chunks;
    partial += (all.part * segments + all.number - lists.chunks) * 2 * kKeys * D;
    write_partial<D>(partial, sums.dk, scale);
    write_partial<D>(partial + kKeys * D, sums.dv, 1);
  } else {
    write_rows<D, kKeys>(shared.k, bwd.dk, all, sums.dk, scale, !own);
    write_rows<D, kKeys>(shared.v, bwd.dv, all, sums.dv, 1, !own);
  }
}

// Adds the partial sums of a chunk's later segments to its dk and dv, in their order. Blocks of a
// chunk's first later segment do, Vec4 numbers a thread at a time.
template <int D, int kKeys>
__global__ void __launch_bounds__(256)
    join_kernel(Top1ChunkBackward bwd, int key_offset, Lists lists, const float* partial) {
  const Top1ChunkForward& args = bwd.forward;
  const int64_t head = blockIdx.y;
  const Segment second = lists.table[head * lists.segments + lists.chunks + blockIdx.x];
  if (second.number != 1 || second.begin == second.end) return;
  const int rest = lists.begin(head, second.chunk + 1) - second.begin;
  const int count = (rest + kSegment - 1) / kSegment;
  const int keys = min(kKeys, int(args.chunk_size) - key_offset);
  partial += (head * (lists.segments - lists.chunks) + blockIdx.x) * 2 * kKeys * D;
  const int64_t t = second.chunk * args.chunk_size + key_offset;
  for (int i = blockIdx.z * 256 + threadIdx.x; i < 2 * keys * D / 4; i += 256 * gridDim.z) {
    const int key = i / (D / 4) % keys;
    const int column = i % (D / 4) * 4;
    const int which = i / (keys * D / 4);
    bf16* to =
        head_row<D>(which ? bwd.dv : bwd.dk, head / args.kv_heads, t + key, head % args.kv_heads) +
        column;
    uint2& pairs = *reinterpret_cast<uint2*>(to);
    const float2 low = unpack_bf16x2(pairs.x);
    const float2 high = unpack_bf16x2(pairs.y);
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
  const Top1ChunkForward& args = bwd.forward;
  const int64_t heads = args.batch * args.kv_heads;
  const int64_t later = heads * (lists.segments - lists.chunks);
  partial = arena.take<float>(later * 2 * block_keys(args) * args.head_dim);
  finished = arena.take<int>(heads * lists.chunks);
}

void chunk_gradients(const Top1ChunkBackward& bwd, const GradientWorkspace& scratch,
                     const Lists& lists, bool own, bool chosen, Stream stream) {
  const Top1ChunkForward& args = bwd.forward;
  const unsigned heads = unsigned(args.batch * args.kv_heads);
  const unsigned blocks = heads * unsigned(chosen ? lists.segments : lists.chunks);
  if (own)
    cudaMemsetAsync(scratch.finished, 0, size_t(heads) * lists.chunks * sizeof(int),
                    cuda_stream(stream));
  with_head_dim(args.head_dim, [&](auto d) {
    with_constant<64, 128>(block_keys(args), [&](auto keys) {
      for (int offset = 0; offset < args.chunk_size; offset += keys()) {
        launch_kernel(gradient_kernel<d(), keys()>, blocks, keys() * 2,
                      BackwardSmem<d(), keys()>::kBytes, stream, bwd, offset, own, chosen, lists,
                      scratch.partial, scratch.finished);
        if (!chosen || lists.segments == lists.chunks) continue;
        launch_kernel(join_kernel<d(), keys()>, dim3(lists.segments - lists.chunks, heads, 4), 256,
                      0, stream, bwd, offset, lists, scratch.partial);
      }
    });
  });
}

}  // namespace assay::ops::cuda::top1
