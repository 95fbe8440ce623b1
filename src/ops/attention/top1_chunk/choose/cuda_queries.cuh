#pragma once
// The queries that a block of the forward or of the backward pass goes through, those of its chunk
// and then those that chose the chunk, and the order in which blocks write to a query.
#include <cuda/atomic>

#include "ops/attention/top1_chunk/attend/cuda_chunk.cuh"

namespace assay::ops::cuda::top1 {

// A block's keys, of one chunk, and its tiles of queries. Block i is of key head i % heads. With
// n = i / heads: of the last chunk but n, its own queries (own) and the first segment of its list
// (chosen); after all chunks, of a later segment.
struct QueryTiles {
  // part: of the key heads of the batch; head: first of group
  int part;
  int b;
  int kv;
  int head;
  int group;
  int time;
  bool later;  // a later segment
  int number;  // index of that segment in the table, or of the chunk
  // [first_key, first_key + keys) of the sequence, or none
  int first_key;
  int keys = 0;
  int own;  // queries of a head that are the chunk's, from first_key on
  // those of own queries come first
  int own_tiles = 0;
  int tiles;
  // the segment
  int list_begin;
  int list_end;
  const int* order;

  // At most `most_keys` keys of the chunk, from `offset` on.
  __device__ QueryTiles(const Top1ChunkForward& args, const Lists& lists, bool reads_own,
                        bool chosen, int offset, int most_keys)
      : group(int(args.heads / args.kv_heads)), time(int(args.time)) {
    const int heads = int(args.batch * args.kv_heads);
    const int n = int(blockIdx.x) / heads;
    part = blockIdx.x % heads;
    b = part / int(args.kv_heads);
    kv = part % int(args.kv_heads);
    head = kv * group;
    later = n >= lists.chunks;
    number = later ? n : lists.chunks - 1 - n;
    order = lists.order + row(0);
    Segment list{number, 0, 0, 0};
    if (chosen) list = lists.table[int64_t{part} * lists.segments + number];
    list_begin = list.begin;
    list_end = list.end;
    const bool has_own = reads_own && !later;
    if (list_begin == list_end && !has_own) return;
    const int chunk = later ? list.chunk : number;
    const int begin = chunk * int(args.chunk_size);
    const int end = min(time, begin + int(args.chunk_size));
    first_key = begin + offset;
    keys = max(0, min(most_keys, end - first_key));
    own = end - first_key;
    if (has_own) own_tiles = (group * own + kTile - 1) / kTile;
    tiles = own_tiles + (list_end - list_begin + kTile - 1) / kTile;
  }
  __device__ bool listed(int tile) const { return tile >= own_tiles; }
  // The tile's queries are [first, min(first + kTile, end)) of the list or of the chunk.
  __device__ int first(int tile) const {
    return listed(tile) ? list_begin + (tile - own_tiles) * kTile : tile * kTile;
  }
  __device__ int end(int tile) const { return listed(tile) ? list_end : group * own; }
  // The item of the tile's query `row`, or the last one.
  __device__ int item(int tile, int row) const {
    const int i = min(first(tile) + row, end(tile) - 1);
    if (listed(tile)) return order[i];
    return group == 1 ? first_key + i : i / own * time + first_key + i % own;
  }
  // The index of an item's query in [B, H, T].
  __device__ int64_t row(int item) const { return int64_t{part} * group * time + item; }
};

// The query of an item.
struct Query {
  int time;
  int head;
  __device__ Query(const QueryTiles& all, int item) : time(item), head(all.head) {
    if (all.group == 1) return;
    time = item % all.time;
    head += item / all.time;
  }
};

// Two blocks write to a query: the block of its own chunk writes, then the block of the chosen
// chunk adds. A chosen chunk is earlier, and blocks go from the last chunk to the first: so every
// block waits only for blocks of lower numbers, which are on the device already, because the device
// starts blocks in the order of their numbers (CUB's scan relies on this, too). And no block waits
// before its own queries are done.
struct OwnQueries {
  using Count = ::cuda::atomic_ref<int, ::cuda::thread_scope_device>;
  int* finished;  // [chunks] of the head: keys of the chunk that its own queries have read
  __device__ OwnQueries(const Lists& lists, int part, int* all)
      : finished(all + int64_t{part} * lists.chunks) {}
  // By one thread, after a barrier.
  __device__ void finish(int chunk, int keys) const {
    Count(finished[chunk]).store(keys, ::cuda::memory_order_release);
  }
  // Until the own chunks of the list's queries have written. By all threads; a barrier must follow
  // before other threads use this.
  __device__ void wait_for(const QueryTiles& all, int chunk_size, int keys) const {
    for (int i = all.list_begin + int(threadIdx.x); i < all.list_end; i += blockDim.x) {
      int& chunk = finished[Query(all, all.order[i]).time / chunk_size];
      while (Count(chunk).load(::cuda::memory_order_acquire) < keys) __nanosleep(50);
    }
  }
};

}  // namespace assay::ops::cuda::top1
