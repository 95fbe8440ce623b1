// The forward pass: a block holds the keys and values of a chunk in shared memory and goes through
// the queries that read them, a tile at a time.
#include "ops/attention/top1_chunk/choose/cuda_queries.cuh"

namespace assay::ops::cuda::top1 {
namespace {

// The items of a lane's two rows of a tile.
struct LaneItems {
  int of[2];
  __device__ void read(const QueryTiles& all, int tile) {
    if (tile >= all.tiles) return;
    for (int i = 0; i < 2; ++i) of[i] = all.item(tile, lane_row(i));
  }
};

// Rows of q of a tile, to shared memory; `out` on its way if they join it.
template <int D>
__device__ void fetch(WgmmaTile<D, kTile> to, const Top1ChunkForward& args, const QueryTiles& all,
                      const LaneItems& items, bool joins) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Query query(all, items.of[i]);
    copy_query(to, lane_row(i), head_row<D>(args.q, all.b, query.time, query.head));
    if (joins && lane * 64 < D)
      prefetch_l2(head_row<D>(args.out, all.b, query.time, query.head) + lane * 64);
  }
  cp_async_commit_group();
}

__device__ inline Limits limits_of(const QueryTiles& all, int tile, const LaneItems& items) {
  const int keys = all.keys;
  if (all.listed(tile)) return {{keys, keys}, keys, keys};
  const auto limit = [&](int i) { return Query(all, items.of[i]).time - all.first_key + 1; };
  const int begin = all.first(tile) % all.own;
  if (begin + kTile > all.own) return {{limit(0), limit(1)}, 1, keys};  // queries of another head
  return {{limit(0), limit(1)}, begin + 1, begin + kTile};
}

// Sums over the keys that the lane's two rows read: out = o / weight, logsumexp = offset + log₂ sum
// in base 2. weight: the sum of the weights as bf16, as products take them; in two columns.
template <int D>
struct RowOutputs {
  float o[D / 8][4];
  float weight[4];
  float sum[2];

  __device__ void attend(const ChunkSmem<D, 2>& shared, int stage, const Limits& limits,
                         float scale, const float (&offset)[2]) {
    each_element(o, [](float& x, int, int) { x = 0; });
    for (float& x : weight) x = 0;
    sum[0] = sum[1] = 0;
    each_product(shared, stage, limits, [&](float(&s)[kKeys / 8][4], int key) {
      exponentials(s, sum, key, limits, scale, offset);
      uint32_t weights[kKeys / 16][4];
      pack_operand(weights, s);
      const WgmmaDescriptor v = warp_uniform(shared.values(key).columns());
      wgmma_fence();
      wgmma_rows<D>(o, weights, [&](int column, int k) {
        return v + WgmmaTile<D, kTile>::columns_at(column, k);
      });
      wgmma_commit_group();
      constexpr uint32_t kOnes = 0x3f803f80;
#pragma unroll
      for (const auto& operand : weights) mma_m16n8k16(weight, operand, kOnes, kOnes);
      wgmma_wait_group<0>(o);
    });
    for (float& x : sum) x = quad_sum(x);
  }
};

// Blocks as QueryTiles says. own: a launch that reads the own chunks, too; others add to what
// earlier launches have written.
template <int D>
__global__ void __launch_bounds__(kThreads, D == 64 ? 4 : 2)
    attend_kernel(Top1ChunkForward args, Lists lists, bool own, bool chosen, int* finished,
                  int padded) {
  const QueryTiles all(args, lists, own, chosen, 0, int(args.chunk_size));
  if (all.keys == 0) return;
  const OwnQueries own_queries(lists, all.part, finished);
  const auto finish_own = [&] {
    if (own && !all.later && threadIdx.x == 0) own_queries.finish(all.number, 1);
  };
  const ChunkSmem<D, 2> shared(padded);
  const float scale = float(args.scale) * kLog2e;
  // read two tiles ahead, so that no thread waits for them
  LaneItems items;
  LaneItems next;
  LaneItems after;
  items.read(all, 0);
  next.read(all, 1);
  shared.copy(shared.keys(0), args.k, all.b, all.first_key, all.kv, all.keys);
  shared.copy(shared.values(0), args.v, all.b, all.first_key, all.kv, all.keys);
  fetch<D>(shared.queries(0), args, all, items, !own);
  for (int tile = 0, stage = 0; tile < all.tiles; ++tile, stage ^= 1) {
    const bool joins = !own || all.listed(tile);
    cp_async_wait_group<0>();
    fence_proxy_async();
    __syncthreads();
    if (tile + 1 < all.tiles)
      fetch<D>(shared.queries(stage ^ 1), args, all, next, !own || all.listed(tile + 1));
    after.read(all, tile + 2);
    if (own && tile == all.own_tiles) {
      finish_own();
      own_queries.wait_for(all, int(args.chunk_size), 1);
      __syncthreads();
    }
    float* logsumexp[2];
    bf16* out[2];
    float before[2];  // read early, so that no thread waits for it
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Query query(all, items.of[i]);
      out[i] = head_row<D>(args.out, all.b, query.time, query.head);
      logsumexp[i] = static_cast<float*>(args.logsumexp) + all.row(items.of[i]);
      before[i] = joins ? *logsumexp[i] * kLog2e : -INFINITY;
    }
    const Limits limits = limits_of(all, tile, items);
    RowOutputs<D> result;
    float offset[2] = {0, 0};
    result.attend(shared, stage, limits, scale, offset);
    if (find_offsets(offset, result.sum, shared, stage, limits, scale)) {
      result.attend(shared, stage, limits, scale, offset);
      __syncthreads();
    }
    uint32_t old[2][D / 8] = {};
    if (joins) load_lane_rows(old, out);
    float factor[2];
    float old_factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float top = fmaxf(offset[i], before[i]);
      const float share = ex2_approx(before[i] - top);
      const float mine = result.sum[i] * ex2_approx(offset[i] - top);
      const float total = mine + share;
      factor[i] = mine / (total * result.weight[2 * i]);
      old_factor[i] = share / total;
      const bool wanted = all.first(tile) + lane_row(i) < all.end(tile);
      if (!wanted) out[i] = nullptr;
      if (wanted && threadIdx.x % 4 == 0) *logsumexp[i] = (top + log2f(total)) * kLn2;
    }
    add_lane_rows(result.o, old, factor, old_factor);
    // the tile's queries have been used
    store_lane_rows(shared.queries(stage), threadIdx.x / 32 * 16, 0, result.o, out);
    items = next;
    next = after;
  }
  if (all.tiles == all.own_tiles) {
    __syncthreads();
    finish_own();
  }
}

}  // namespace

void attend(const Top1ChunkForward& args, const Lists& lists, bool own, bool chosen, int* finished,
            Stream stream) {
  const unsigned heads = unsigned(args.batch * args.kv_heads);
  const unsigned blocks = heads * unsigned(chosen ? lists.segments : lists.chunks);
  if (own)
    cudaMemsetAsync(finished, 0, size_t(heads) * lists.chunks * sizeof(int), cuda_stream(stream));
  const int padded = padded_chunk(args);
  with_head_dim(args.head_dim, [&](auto d) {
    launch_kernel(attend_kernel<d()>, blocks, kThreads, ChunkSmem<d(), 2>::bytes(padded), stream,
                  args, lists, own, chosen, finished, padded);
  });
}

}  // namespace assay::ops::cuda::top1
