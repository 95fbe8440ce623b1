#pragma once
// The steps of a call, in the order in which they are enqueued; each is a file of its own.
#include <algorithm>

#include "ops/attention/top1_chunk/kernel.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/types.cuh"

namespace assay::ops::cuda::top1 {

// Queries sorted by the chunk that they chose: a stable counting sort, without atomics that
// decide an order. cuda_lists.cu
// The queries of the G heads that share a key head are one sequence of items, item = g·T + t, so
// that everything below is once per (batch, key head). Each list is cut into segments of at most
// kSegment items: what a block reads of a list.

// A choice counts if it is an earlier chunk than the query's own; otherwise the result is -1.
__device__ inline int valid_choice(int64_t choice, int own) {
  return choice >= 0 && choice < own ? int(choice) : -1;
}

constexpr int kSegment = 512;
// Items that a block of the sort takes: so many queries, of which the one is chosen that takes less
// time (query_run()), or pairs of a query and a chunk. With 12 heads of 102,400 queries, all blocks
// of 5120 run at the same time (two per SM); those of 4096 do not.
constexpr int kShortQueryRun = 2048;
constexpr int kQueryRun = 5120;
constexpr int kPairRun = 8192;
int query_run(const Top1ChunkForward& args);

// One block's part of a list: items order[begin … end) of a chunk; number 0, 1, … within the chunk.
struct alignas(16) Segment {
  int chunk;
  int number;
  int begin;
  int end;
};

struct Lists {
  // run: items of one; segments: of a key head
  int items;
  int chunks;
  int run;
  int runs;
  int segments;
  int* order;  // [B·Hk, items] item numbers, sorted; those of no chunk last
  // [B·Hk, segments] the first segment of each chunk, then later segments: of any chunk, by chunk
  // and number, with empty ones among them
  Segment* table;
  // [B·Hk, chunks + 1, runs] where the items of a run that chose the chunk (the last: none) begin,
  // in all of order
  uint32_t* places;
  void* scratch;
  size_t scratch_bytes;
  // Lists of `each` items per query. A block of the sort takes `run` items.
  Lists(const Top1ChunkForward& args, WorkspaceArena& arena, int each, int run);
  // Lists of queries: one item per query.
  Lists(const Top1ChunkForward& args, WorkspaceArena& arena)
      : Lists(args, arena, 1, query_run(args)) {}

  // Where a chunk's list begins in the head's part of order.
  __device__ int begin(int64_t head, int chunk) const {
    return int(places[(head * (chunks + 1) + chunk) * runs] - uint32_t(head * items));
  }
};

// Sorts by the choice of this rank; or pairs, items of a head, by the chunk of each,
// kNoChunk for none.
constexpr uint16_t kNoChunk = 0xffff;
void sort_queries(const Top1ChunkForward& args, const Lists& lists, int rank, Stream stream);
void sort_pairs(const Top1ChunkForward& args, const Lists& lists, const uint16_t* chunks,
                Stream stream);

// Keys of a tile of Exact: a chunk is one of them, or several of 128.
inline int tile_keys(const Top1ChunkForward& args) { return args.chunk_size <= 64 ? 64 : 128; }
inline int tiles_per_chunk(const Top1ChunkForward& args) {
  return int(ceil_div(args.chunk_size, tile_keys(args)));
}
inline int64_t all_chunks(const Top1ChunkForward& args) {
  return ceil_div(args.time, args.chunk_size);
}

// Whether Exact bounds the scores of all chunks first (cuda_filter.cu): from kFilterChunks chunks
// on. A query then keeps at most kFilterSlots chunks, or its block scores all chunks exactly.
constexpr int kFilterSlots = 16;
constexpr int kFilterChunks = 256;
inline bool filters_chunks(const Top1ChunkForward& args) {
  return args.selection == Selection::exact && args.top_k == 1 &&
         args.chunk_size % tile_keys(args) == 0 && all_chunks(args) >= kFilterChunks &&
         args.heads / args.kv_heads * args.time * kFilterSlots < int64_t{1} << 30;
}
inline int listed_chunks(const Top1ChunkForward& args) {
  return filters_chunks(args) ? kFilterSlots : 0;
}

// Chooses: writes selected. cuda_select.cu
struct SelectWorkspace {
  // keys or summaries that queries are scored against, in the tiles that the scoring kernel takes
  bf16* columns;
  float* key_norm;  // [B·Hk, chunks]: the longest key
  float* previous;  // [B, H, T] the score of the rank before, when top_k > 1
  int* again;       // by block of Exact: whether all its queries are scored exactly; or null
  // of queries that the filter is for, else empty, as are scores and pairs:
  // [B, H, T, kFilterSlots] chunks, kNoChunk: none
  uint16_t* listed;
  float* scores;  // [B, H, T, kFilterSlots] exact scores of these, in base 2
  Lists pairs;    // pairs of a query and a chunk, kFilterSlots per query
  SelectWorkspace(const Top1ChunkForward& args, WorkspaceArena& arena);
};
void select_chunks(const Top1ChunkForward& args, const SelectWorkspace& scratch, Stream stream);
// Lists the chunks that Exact may choose, and chooses where that is one. cuda_filter.cu
void filter_chunks(const Top1ChunkForward& args, const SelectWorkspace& scratch, int64_t tiles,
                   Stream stream);
// Chooses the best of those listed by their exact scores. cuda_pairs.cu
void choose_listed(const Top1ChunkForward& args, const SelectWorkspace& scratch, Stream stream);

// Attends to each query's own chunk (own) and to those of lists (chosen). Without `own`, the
// results join what `out` and logsumexp hold. finished: [B·Hk, chunks], scratch. cuda_forward.cu
void attend(const Top1ChunkForward& args, const Lists& lists, bool own, bool chosen, int* finished,
            Stream stream);

// The gradients. cuda_backward.cu
struct GradientWorkspace {
  float* partial;  // [B·Hk, later segments, 2, keys of a block, D]: dk, dv
  int* finished;   // [B·Hk, chunks] keys of the chunk that its own queries have read
  GradientWorkspace(const Top1ChunkBackward& bwd, const Lists& lists, WorkspaceArena& arena);
};
// Adds the gradients of the chunks in `lists` (chosen) to dq, dk and dv. own: includes those of
// each query's own chunk, and writes dq, dk and dv instead of adding to them.
void chunk_gradients(const Top1ChunkBackward& bwd, const GradientWorkspace& scratch,
                     const Lists& lists, bool own, bool chosen, Stream stream);
}  // namespace assay::ops::cuda::top1
