// The best of the chunks that cuda_filter.cu listed for a query, by exact scores. Pairs of a query
// and a listed chunk are sorted by chunk, as queries are for the passes, so that a chunk's keys are
// brought in once per segment.
#include "ops/attention/top1_chunk/attend/cuda_chunk.cuh"
#include "ops/attention/top1_chunk/choose/cuda_scores.cuh"

namespace assay::ops::cuda::top1 {
namespace {

// Exact scores of the pairs of a segment. A row does not depend on its neighbours: the order of
// pairs does not matter.
template <int D>
__global__ void __launch_bounds__(kThreads, D == 64 ? 6 : 3)
    pair_kernel(Top1ChunkForward args, SelectWorkspace scratch, int padded) {
  const Lists& lists = scratch.pairs;
  // A head after the other: the queries of one fit into the L2 cache.
  const int kv_heads = int(args.kv_heads);
  const int head = blockIdx.x / lists.segments;
  const int time = int(args.time);
  const int b = head / kv_heads;
  const int kv = head % kv_heads;
  const int chunk = int(args.chunk_size);
  const Segment segment = lists.table[blockIdx.x];
  if (segment.begin == segment.end) return;
  const ChunkSmem<D, 1> shared(padded);
  const int64_t rows = int64_t{head} * lists.items;
  const int* order = lists.order + rows;
  const bf16* from = head_row<D>(args.q, b, 0, kv * int(args.heads / args.kv_heads));
  const float scale = float(args.scale) * kLog2e;
  const Limits limits{{chunk, chunk}, chunk, chunk};
  const auto read_items = [&](int(&item)[2], int first) {
    for (int i = 0; i < 2; ++i) item[i] = order[min(first + lane_row(i), segment.end - 1)];
  };
  const auto fetch = [&](int stage, const int(&item)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = item[i] / kFilterSlots;
      const int g = query < time ? 0 : query / time;
      copy_query(shared.queries(stage), lane_row(i),
                 from + (query - g * time) * args.q.time_stride + g * D);
    }
    cp_async_commit_group();
  };
  // read long before they are needed
  int item[2];
  int next[2];
  read_items(item, segment.begin);
  read_items(next, segment.begin + kTile);
  shared.copy(shared.keys(0), args.k, b, segment.chunk * chunk, kv, chunk);
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

// The best of each query's list. A query whose list is empty keeps its choice. One thread per
// query.
__global__ void __launch_bounds__(256) pick_kernel(Top1ChunkForward args, SelectWorkspace scratch) {
  const int64_t row = blockIdx.x * int64_t{256} + threadIdx.x;
  if (row >= args.batch * args.heads * args.time) return;
  const int64_t first = row * kFilterSlots;
  float best = -INFINITY;
  int best_chunk = -1;
#pragma unroll
  for (int slot = 0; slot < kFilterSlots; slot += 4) {
    const auto chunks = *reinterpret_cast<const Vec<uint16_t, 4>*>(scratch.listed + first + slot);
    const auto scores = load_float4(scratch.scores + first + slot);
    for (int i = 0; i < 4; ++i) {
      const int chunk = chunks[i];
      const float x = isnan(scores[i]) ? INFINITY : scores[i];
      const bool better = best_chunk < 0 || x > best || (x == best && chunk < best_chunk);
      if (chunk == kNoChunk || !better) continue;
      best = x;
      best_chunk = chunk;
    }
  }
  if (best_chunk >= 0) args.selected[row] = best_chunk;
}

}  // namespace

void choose_listed(const Top1ChunkForward& args, const SelectWorkspace& scratch, Stream stream) {
  sort_pairs(args, scratch.pairs, scratch.listed, stream);
  with_head_dim(args.head_dim, [&](auto d) {
    launch_kernel(pair_kernel<d()>, unsigned(args.batch * args.kv_heads * scratch.pairs.segments),
                  kThreads, ChunkSmem<d(), 1>::bytes(padded_chunk(args)), stream, args, scratch,
                  padded_chunk(args));
  });
  launch_threads(pick_kernel, args.batch * args.heads * args.time, 256, stream, args, scratch);
}

}  // namespace assay::ops::cuda::top1
