#include <bit>
#include <cub/block/block_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

#include "ops/attention/top1_chunk/cuda_passes.cuh"
#include "ops/cuda/launch.cuh"

namespace assay::ops::cuda::top1 {
namespace {

constexpr int kThreads = 512;

// The sort key of an item: the chunk chosen at one rank, or the chunk of a pair. A key that is not
// less than the number of chunks means none.
struct QueryChoices {
  // items of equal choice stay in order, so that sums over a list have a fixed order
  static constexpr bool kInOrder = true;
  const int64_t* selected;
  int top_k;
  int time;
  int chunk_size;
  __device__ unsigned operator()(int64_t head_items, int item) const {
    const int own = int(item % unsigned(time)) / chunk_size;
    return unsigned(valid_choice(selected[(head_items + item) * top_k], own));
  }
};
struct PairChoices {
  static constexpr bool kInOrder = false;
  const uint16_t* chunks;
  __device__ unsigned operator()(int64_t head_items, int item) const {
    return chunks[head_items + item];
  }
};

// How many items of a run chose each chunk. One block per run.
template <class Choices, int kRun>
__global__ void __launch_bounds__(kThreads) count_kernel(Choices choices, Lists lists) {
  extern __shared__ unsigned counters[];
  const int run = blockIdx.x;
  const int end = min(lists.items, (run + 1) * kRun);
  const unsigned none = lists.chunks;
  const int64_t head = blockIdx.y;
  for (int c = threadIdx.x; c <= none; c += kThreads) counters[c] = 0;
  __syncthreads();
#pragma unroll 8
  for (int item = run * kRun + threadIdx.x; item < end; item += kThreads)
    atomicAdd(counters + min(choices(head * lists.items, item), none), 1);
  __syncthreads();
  for (int c = threadIdx.x; c <= none; c += kThreads)
    lists.places[(head * (none + 1) + c) * lists.runs + run] = counters[c];
}

// Cuts the lists of a head into segments. Later ones of a chunk are numbers ⌊begin / kSegment⌋ and
// after of the later ones: as many as it needs, or more, so that no other list has to be known.
__device__ void cut(const Lists& lists, int64_t head) {
  Segment* first = lists.table + head * lists.segments;
  Segment* later = first + lists.chunks;
  for (int c = blockIdx.x * kThreads + threadIdx.x; c <= lists.chunks; c += gridDim.x * kThreads) {
    const bool none = c == lists.chunks;
    const int begin = lists.begin(head, c);
    const int end = none ? begin : lists.begin(head, c + 1);
    if (!none) first[c] = {c, 0, begin, min(end, begin + kSegment)};
    const int begin_later = begin / kSegment;
    const int end_later = none ? lists.segments - lists.chunks : end / kSegment;
    for (int i = begin_later; i < end_later; ++i) {
      const int number = i - begin_later + 1;
      const int from = min(end, begin + number * kSegment);
      later[i] = {c, number, from, min(end, from + kSegment)};
    }
  }
}

// Sorts a run, 5 bits at a time.
template <int kRun>
using Sort = cub::BlockRadixSort<uint32_t, kThreads, kRun / kThreads, cub::NullType, 5,
                                 /*MEMOIZE_OUTER_SCAN=*/false>;

// Each item to its place: after those of lower chunks, of earlier runs, and of the same
// run before it. One block per run, which is sorted in shared memory first, so that neighbours
// are written together.
template <class Choices, int kRun>
__global__ void __launch_bounds__(kThreads, 2)
    place_kernel(Choices choices, Lists lists, int chunk_bits) {
  constexpr int kEach = kRun / kThreads;
  using Storage = typename Sort<kRun>::TempStorage;
  extern __shared__ __align__(16) unsigned char memory[];
  uint32_t* sorted = reinterpret_cast<uint32_t*>(memory);
  uint16_t* first = reinterpret_cast<uint16_t*>(memory + sizeof(Storage));
  const int begin = blockIdx.x * kRun;
  const int count = min(kRun, lists.items - begin);
  const unsigned none = lists.chunks;
  const int64_t head = blockIdx.y;
  const int64_t head_items = head * lists.items;
  uint32_t key[kEach];  // chunk << 16 | number in the run
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const int i = Choices::kInOrder ? threadIdx.x * kEach + k : k * kThreads + threadIdx.x;
    key[k] = i < count ? min(choices(head_items, begin + i), none) << 16 | i : ~0u;
  }
  Sort<kRun>(*reinterpret_cast<Storage*>(memory)).SortBlockedToStriped(key, 16, 16 + chunk_bits);
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kEach; ++k) sorted[k * kThreads + threadIdx.x] = key[k];
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads)
    if (i == 0 || sorted[i - 1] >> 16 != sorted[i] >> 16) first[sorted[i] >> 16] = i;
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int chunk = sorted[i] >> 16;
    const uint32_t place = lists.places[(head * (none + 1) + chunk) * lists.runs + blockIdx.x];
    lists.order[head_items + (place - uint32_t(head_items)) + i - first[chunk]] =
        begin + int(sorted[i] & 0xffff);
  }
  cut(lists, head);
}

cudaError_t scan(const Lists& lists, int64_t heads, size_t& bytes, Stream stream) {
  return cub::DeviceScan::ExclusiveSum(lists.scratch, bytes, lists.places, lists.places,
                                       heads * (lists.chunks + 1) * lists.runs,
                                       cuda_stream(stream));
}

template <int kRun, class Choices>
void sort(const Choices& choices, const Top1ChunkForward& args, const Lists& lists, Stream stream) {
  const int64_t heads = args.batch * args.kv_heads;
  const int64_t chunks = lists.chunks + 1;
  const dim3 runs(lists.runs, unsigned(heads));
  launch_kernel(count_kernel<Choices, kRun>, runs, kThreads, chunks * sizeof(unsigned), stream,
                choices, lists);
  size_t bytes = lists.scratch_bytes;
  check_cuda("top1_chunk: scan", scan(lists, heads, bytes, stream));
  launch_kernel(place_kernel<Choices, kRun>, runs, kThreads,
                sizeof(typename Sort<kRun>::TempStorage) + chunks * sizeof(uint16_t), stream,
                choices, lists, int(std::bit_width(uint64_t(chunks))));
}

}  // namespace

int query_run(const Top1ChunkForward& args) {
  const int64_t heads = args.batch * args.kv_heads;
  const int64_t items = args.heads / args.kv_heads * args.time;
  const auto time = [&](int64_t run) {
    return run * ceil_div(heads * ceil_div(items, run), 2 * sm_count());
  };
  return time(kShortQueryRun) < time(kQueryRun) ? kShortQueryRun : kQueryRun;
}

Lists::Lists(const Top1ChunkForward& args, WorkspaceArena& arena, int each, int run_items)
    : items(int(args.heads / args.kv_heads * args.time * each)),
      chunks(int(ceil_div(args.time, args.chunk_size))),
      run(run_items),
      runs(int(ceil_div(items, run))),
      segments(chunks + items / kSegment),
      scratch(nullptr),
      scratch_bytes(0) {
  const int64_t heads = args.batch * args.kv_heads;
  order = arena.take<int>(heads * items);
  table = arena.take<Segment>(heads * segments);
  places = arena.take<uint32_t>(heads * (chunks + 1) * runs);
  check_cuda("top1_chunk: the size of the scan's scratch",
             scan(*this, heads, scratch_bytes, nullptr));
  scratch = arena.take<char>(int64_t(scratch_bytes));
}

void sort_queries(const Top1ChunkForward& args, const Lists& lists, int rank, Stream stream) {
  const QueryChoices choices{args.selected + rank, int(args.top_k), int(args.time),
                             int(args.chunk_size)};
  with_constant<kShortQueryRun, kQueryRun>(
      lists.run, [&](auto run) { sort<run.value>(choices, args, lists, stream); });
}
void sort_pairs(const Top1ChunkForward& args, const Lists& lists, const uint16_t* chunks,
                Stream stream) {
  sort<kPairRun>(PairChoices{chunks}, args, lists, stream);
}

}  // namespace assay::ops::cuda::top1
