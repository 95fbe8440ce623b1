#pragma once
// Queries sorted by the chunk that they chose: a stable counting sort, without atomics that
// decide an order.
// The queries of the G heads that share a key head are one sequence of items, item = g·T + t, so
// that everything below is once per (batch, key head). Each list is cut into segments of at most
// kSegment items: the work of a block.
#include "ops/top1_chunk/kernel.h"

namespace assay::ops::cuda::top1 {

// A choice counts if it is an earlier chunk than the query's own; otherwise the result is -1.
__device__ inline int valid_choice(int64_t choice, int own) {
  return choice >= 0 && choice < own ? int(choice) : -1;
}

constexpr int kSegment = 512;
// Items that a block of the sort takes: so many queries, or pairs of a query and a chunk.
constexpr int kQueryRun = 4096, kPairRun = 8192;

// One block's part of a list: items order[begin … end) of a chunk; number 0, 1, … within the chunk.
struct alignas(16) Segment {
  int chunk, number, begin, end;
};

struct Lists {
  int items, chunks, runs, segments;  // segments: of a key head
  int* order;                         // [B·Hk, items] item numbers, sorted; those of no chunk last
  Segment* table;                     // [B·Hk, segments]
  // [B·Hk, chunks + 1, runs] where the items of a run that chose the chunk (the last: none) begin,
  // in all of order
  uint32_t* places;
  void* scratch;
  size_t scratch_bytes;
  Lists(const Top1ChunkForward& p, WorkspaceArena& arena, int run = kQueryRun);

  // Where a chunk's list begins in the head's part of order.
  __device__ int begin(int64_t head, int chunk) const {
    return int(places[(head * (chunks + 1) + chunk) * runs] - uint32_t(head * items));
  }
};

__device__ inline Segment segment_of(const Lists& lists, int heads, unsigned block) {
  return lists.table[int64_t{block % heads} * lists.segments + block / heads];
}

// Sorts by the choice of this rank; or pairs [B, H, shortlist, T], by the chunk of each,
// kNoChunk for none.
constexpr uint16_t kNoChunk = 0xffff;
void sort_queries(const Top1ChunkForward& p, const Lists& lists, int rank, Stream stream);
void sort_pairs(const Top1ChunkForward& p, const Lists& lists, const uint16_t* chunks,
                Stream stream);

}  // namespace assay::ops::cuda::top1
