#include <algorithm>

#include "ops/cuda/reduce.cuh"
#include "ops/top1_chunk/cuda_lists.cuh"

namespace assay::ops::cuda::top1 {
namespace {

constexpr int kScanThreads = 1024, kSumWarps = 8, kAhead = 16;  // kAhead: loads in flight
constexpr int kRunWarps = 16, kShortestRun = 512, kLongestRun = 16384;

// What items are sorted by: the choice of one rank, or the chunk of a pair. −1: none.
struct QueryChoices {
  // of equal choice the earlier item first: sums over a list have an order
  static constexpr bool kInOrder = true;
  const int64_t* selected;
  int top_k, time, chunk_size;
  __device__ int operator()(int64_t head_items, int item) const {
    const int own = int(item % unsigned(time)) / chunk_size;
    return valid_choice(selected[(head_items + item) * top_k], own);
  }
};
struct PairChoices {
  static constexpr bool kInOrder = false;
  const uint16_t* chunks;
  __device__ int operator()(int64_t head_items, int item) const {
    const int chunk = chunks[head_items + item];
    return chunk == kNoChunk ? -1 : chunk;
  }
};

// How many items of a run chose each chunk. One block per run.
template <class Choices>
__global__ void __launch_bounds__(32 * kRunWarps) count_kernel(Choices choices, Lists lists) {
  extern __shared__ int counters[];
  const int run = blockIdx.x;
  const int64_t head = blockIdx.y;
  for (int c = threadIdx.x; c < lists.chunks; c += blockDim.x) counters[c] = 0;
  __syncthreads();
  const int end = min(lists.items, (run + 1) * lists.run_length);
#pragma unroll 8
  for (int item = run * lists.run_length + threadIdx.x; item < end; item += 32 * kRunWarps) {
    const int chunk = choices(head * lists.items, item);
    if (chunk >= 0) atomicAdd(counters + chunk, 1);
  }
  __syncthreads();
  for (int c = threadIdx.x; c < lists.chunks; c += blockDim.x)
    lists.counts[(head * lists.runs + run) * lists.chunks + c] = counters[c];
}

// f(run, count) of a chunk's runs [first, end), kAhead loads in flight.
template <class F>
__device__ void each_run(const int* counts, int chunks, int first, int end, const F& f) {
  for (; first < end; first += kAhead) {
    int count[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      count[i] = first + i < end ? counts[int64_t{first + i} * chunks] : 0;
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (first + i < end) f(first + i, count[i]);
  }
}

// counts becomes what earlier runs hold of the same chunk; the total goes to begin. One lane per
// chunk, one warp per part of the runs.
__global__ void __launch_bounds__(32 * kSumWarps) sum_runs_kernel(Lists lists) {
  __shared__ int sums[kSumWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, chunk = blockIdx.x * 32 + lane;
  const int64_t head = blockIdx.y;
  const int part = (lists.runs + kSumWarps - 1) / kSumWarps, first = warp * part;
  const int end = chunk < lists.chunks ? min(lists.runs, first + part) : 0;
  int* counts = lists.counts + head * lists.runs * lists.chunks + chunk;
  int sum = 0;
  each_run(counts, lists.chunks, first, end, [&](int, int count) { sum += count; });
  sums[warp][lane] = sum;
  sum = 0;
  __syncthreads();
  for (int w = 0; w < warp; ++w) sum += sums[w][lane];
  each_run(counts, lists.chunks, first, end, [&](int run, int count) {
    counts[int64_t{run} * lists.chunks] = sum;
    sum += count;
  });
  if (warp == kSumWarps - 1 && chunk < lists.chunks)
    lists.begin[head * (lists.chunks + 1) + chunk] = sum;
}

// Σ over the threads up to this one.
__device__ int2 block_scan(int2 x) {
  __shared__ int2 totals[kScanThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  x = int2{warp_inclusive_scan(x.x), warp_inclusive_scan(x.y)};
  if (lane == 31) totals[warp] = x;
  __syncthreads();
  for (int i = 0; i < warp; ++i) {
    x.x += totals[i].x;
    x.y += totals[i].y;
  }
  __syncthreads();
  return x;
}

// begin and first from the lengths in begin; the table. One block per key head.
__global__ void __launch_bounds__(kScanThreads) scan_kernel(Lists lists) {
  __shared__ int2 carry;
  int* begin = lists.begin + blockIdx.x * int64_t{lists.chunks + 1};
  int* first = lists.first + blockIdx.x * int64_t{lists.chunks + 1};
  Segment* table = lists.table + blockIdx.x * int64_t{lists.segments};
  if (threadIdx.x == 0) carry = int2{0, 0};
  __syncthreads();
  for (int c0 = 0; c0 < lists.chunks; c0 += kScanThreads) {
    const int c = c0 + threadIdx.x, length = c < lists.chunks ? begin[c] : 0;
    const int segments = c < lists.chunks ? max(1, (length + kSegment - 1) / kSegment) : 0;
    const int2 before = carry, upto = block_scan(int2{length, segments});
    const int end = before.y + upto.y, items_end = before.x + upto.x, items = items_end - length;
    if (c < lists.chunks) {
      begin[c] = items;
      first[c] = end - segments;
    }
    for (int s = 0; s < segments; ++s)
      table[end - segments + s] = {c, s, items + s * kSegment,
                                   min(items_end, items + (s + 1) * kSegment)};
    __syncthreads();
    if (threadIdx.x == kScanThreads - 1) carry = int2{before.x + upto.x, end};
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    begin[lists.chunks] = carry.x;
    first[lists.chunks] = carry.y;
  }
  for (int s = carry.y + threadIdx.x; s < lists.segments; s += kScanThreads) table[s] = {-1};
}

// f(item, chunk, whether the lane counts, how many lanes before it have its chunk, how many have
// it) of a warp's items [first, end), 32 at a time in their order.
template <class Choices, class F>
__device__ void each_item(const Choices& choices, int64_t head_items, int first, int end,
                          const F& f) {
  constexpr int kItems = 4;  // loads in flight
  const int lane = threadIdx.x % 32;
  for (; first < end; first += 32 * kItems) {
    int choice[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = first + i * 32 + lane;
      choice[i] = item < end ? choices(head_items, item) : -1;
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (first + i * 32 >= end) break;
      const unsigned same = __match_any_sync(~0u, choice[i]);
      f(first + i * 32 + lane, choice[i], __popc(same & ((1u << lane) - 1)), __popc(same));
      __syncwarp();
    }
  }
}

// next[warp][chunk], how many items of a run each warp has of a chunk, becomes their place within
// the sorted run.
__device__ void places_in_run(uint16_t* next, int warps, int chunks) {
  const int each = (chunks + blockDim.x - 1) / blockDim.x, first = threadIdx.x * each,
            end = min(chunks, first + each);
  int sum = 0;
  for (int c = first; c < end; ++c)
    for (int w = 0; w < warps; ++w) sum += next[w * chunks + c];
  int place = block_scan(int2{sum, 0}).x - sum;
  for (int c = first; c < end; ++c)
    for (int w = 0; w < warps; ++w) {
      const int count = next[w * chunks + c];
      next[w * chunks + c] = uint16_t(place);
      place += count;
    }
}

// Adds one to a counter; what it was before. No counter reaches 2^16.
__device__ int count_up(uint16_t* counters, int i) {
  const uint32_t before =
      atomicAdd(reinterpret_cast<uint32_t*>(counters) + i / 2, i % 2 ? 0x10000u : 1u);
  return i % 2 ? before >> 16 : before & 0xffff;
}

// Sorts the items [begin, end) into `sorted`, chunk << 16 | number in the run.
// counters[rows][chunks], zeros; the last row becomes where each chunk ends.
template <class Choices>
__device__ void sort_run(uint32_t* sorted, uint16_t* counters, int rows, const Choices& choices,
                         int64_t head_items, int begin, int end, int chunks) {
  const auto put = [&](int place, int chunk, int item) {
    sorted[place] = uint32_t(chunk) << 16 | uint32_t(item - begin);
  };
  if constexpr (Choices::kInOrder) {  // one warp per part of the run, and a row of counters
    const int warp = threadIdx.x / 32, part = ((end - begin + 31) / 32 + rows - 1) / rows * 32;
    const int first = begin + warp * part, last = min(end, first + part);
    uint16_t* mine = counters + warp * chunks;
    each_item(choices, head_items, first, last, [&](int, int chunk, int before, int count) {
      if (chunk >= 0 && before == 0) mine[chunk] += count;
    });
    __syncthreads();
    places_in_run(counters, rows, chunks);
    __syncthreads();
    each_item(choices, head_items, first, last, [&](int item, int chunk, int before, int count) {
      const int place = chunk >= 0 ? mine[chunk] + before : 0;
      __syncwarp();
      if (chunk >= 0) put(place, chunk, item);
      if (chunk >= 0 && before + 1 == count) mine[chunk] = uint16_t(place + 1);
    });
  } else {
    const auto each = [&](const auto& f) {
#pragma unroll 8
      for (int item = begin + threadIdx.x; item < end; item += blockDim.x)
        if (const int chunk = choices(head_items, item); chunk >= 0) f(item, chunk);
    };
    each([&](int, int chunk) { count_up(counters, chunk); });
    __syncthreads();
    places_in_run(counters, 1, chunks);
    __syncthreads();
    each([&](int item, int chunk) { put(count_up(counters, chunk), chunk, item); });
  }
}

// Each item to its place: after those of lower chunks, of earlier runs, and of the same
// run before it. One block per run, which is sorted in shared memory first, so that neighbours
// are written together.
template <class Choices>
__global__ void __launch_bounds__(32 * kRunWarps) place_kernel(Choices choices, Lists lists) {
  extern __shared__ uint32_t sorted[];
  uint16_t* counters = reinterpret_cast<uint16_t*>(sorted + lists.run_length);
  const int rows = Choices::kInOrder ? blockDim.x / 32 : 1, run = blockIdx.x,
            begin = run * lists.run_length;
  const int64_t head = blockIdx.y, head_items = head * lists.items;
  for (int i = threadIdx.x; i < rows * lists.chunks; i += blockDim.x) counters[i] = 0;
  __syncthreads();
  sort_run(sorted, counters, rows, choices, head_items, begin,
           min(lists.items, begin + lists.run_length), lists.chunks);
  __syncthreads();
  const uint16_t* ends = counters + (rows - 1) * lists.chunks;
  const int* of_run = lists.counts + (head * lists.runs + run) * lists.chunks;
  const int* of_head = lists.begin + head * (lists.chunks + 1);
  const int count = ends[lists.chunks - 1];
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int chunk = sorted[i] >> 16, from = chunk > 0 ? ends[chunk - 1] : 0;
    lists.order[head_items + __ldg(of_head + chunk) + __ldg(of_run + chunk) + i - from] =
        begin + int(sorted[i] & 0xffff);
  }
}

// Warps of a block that places, as many as have room for their counters.
int place_warps(const Lists& lists) {
  return int(std::clamp<int64_t>(24 * 1024 / lists.chunks, 1, kRunWarps));
}

template <class Choices>
void sort(const Choices& choices, unsigned heads, const Lists& lists, Stream stream) {
  const int warps = place_warps(lists), bytes = int(lists.chunks * sizeof(int));
  const int rows = Choices::kInOrder ? warps : 1;
  const int place_bytes =
      int(lists.run_length * sizeof(uint32_t) + (rows * lists.chunks + 1) * sizeof(uint16_t));
  const dim3 runs(lists.runs, heads);
  launch_kernel(count_kernel<Choices>, runs, 32 * kRunWarps, bytes, stream, choices, lists);
  launch_kernel(sum_runs_kernel, dim3(unsigned(ceil_div(lists.chunks, 32)), heads), 32 * kSumWarps,
                0, stream, lists);
  launch_kernel(scan_kernel, heads, kScanThreads, 0, stream, lists);
  launch_kernel(place_kernel<Choices>, runs, 32 * warps, place_bytes, stream, choices, lists);
}

}  // namespace

Lists::Lists(const Top1ChunkForward& p, WorkspaceArena& arena, int most_runs)
    : items(int(p.heads / p.kv_heads * p.time)),
      chunks(int(ceil_div(p.time, p.chunk_size))),
      run_length(int(
          ceil_div(std::clamp<int64_t>(ceil_div(items, most_runs), kShortestRun, kLongestRun), 32) *
          32)),
      segments(int(chunks + ceil_div(items, kSegment))) {
  runs = int(ceil_div(items, run_length));
  const int64_t heads = p.batch * p.kv_heads;
  order = arena.take<int>(heads * items);
  begin = arena.take<int>(heads * (chunks + 1));
  first = arena.take<int>(heads * (chunks + 1));
  table = arena.take<Segment>(heads * segments);
  counts = arena.take<int>(heads * runs * chunks);
}

void sort_queries(const Top1ChunkForward& p, const Lists& lists, int rank, Stream stream) {
  const QueryChoices choices{p.selected + rank, int(p.top_k), int(p.time), int(p.chunk_size)};
  sort(choices, unsigned(p.batch * p.kv_heads), lists, stream);
}
void sort_pairs(const Top1ChunkForward& p, const Lists& lists, const uint16_t* chunks,
                Stream stream) {
  sort(PairChoices{chunks}, unsigned(p.batch * p.kv_heads), lists, stream);
}

}  // namespace assay::ops::cuda::top1
