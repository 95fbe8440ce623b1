#include "ops/top1_chunk/cuda_lists.cuh"

namespace assay::ops::cuda::top1 {
namespace {

constexpr int kScanThreads = 1024, kSumWarps = 8, kAhead = 16;  // kAhead: loads in flight

__device__ int choice_of(const Top1ChunkForward& p, const Lists& lists, int64_t head, int item, int rank) {
  const int own = int(item % unsigned(p.time)) / int(p.chunk_size);
  return valid_choice(p.selected[(head * lists.items + item) * p.top_k + rank], own);
}

// How many items of a run chose each chunk. A warp a run.
__global__ void count_kernel(Top1ChunkForward p, Lists lists, int rank) {
  extern __shared__ int counters[];
  const int lane = threadIdx.x, run = blockIdx.x;
  const int64_t head = blockIdx.y;
  for (int c = lane; c < lists.chunks; c += 32) counters[c] = 0;
  __syncwarp();
  const int end = min(lists.items, (run + 1) * lists.run_length);
#pragma unroll 8
  for (int item = run * lists.run_length + lane; item < end; item += 32) {
    const int chunk = choice_of(p, lists, head, item, rank);
    if (chunk >= 0) atomicAdd(counters + chunk, 1);
  }
  __syncwarp();
  for (int c = lane; c < lists.chunks; c += 32)
    lists.counts[(head * lists.runs + run) * lists.chunks + c] = counters[c];
}

// f(run, count) of a chunk's runs [first, end), kAhead loads in flight.
template <class F>
__device__ void each_run(const int* counts, int chunks, int first, int end, const F& f) {
  for (; first < end; first += kAhead) {
    int count[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) count[i] = first + i < end ? counts[int64_t{first + i} * chunks] : 0;
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (first + i < end) f(first + i, count[i]);
  }
}

// counts becomes what earlier runs hold of the same chunk; the total goes to begin. A lane a chunk, a warp a part of
// the runs.
__global__ void __launch_bounds__(32 * kSumWarps) sum_runs_kernel(Lists lists) {
  __shared__ int sums[kSumWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, chunk = blockIdx.x * 32 + lane;
  const int64_t head = blockIdx.y;
  const int part = (lists.runs + kSumWarps - 1) / kSumWarps, first = warp * part;
  const int end = chunk < lists.chunks ? min(lists.runs, first + part) : 0;
  int* counts = lists.counts + head * lists.runs * lists.chunks + chunk;
  int sum = 0;
  each_run(counts, lists.chunks, first, end, [&](int, int count) { sum += count; });
  sums[warp][lane] = sum, sum = 0;
  __syncthreads();
  for (int w = 0; w < warp; ++w) sum += sums[w][lane];
  each_run(counts, lists.chunks, first, end,
           [&](int run, int count) { counts[int64_t{run} * lists.chunks] = sum, sum += count; });
  if (warp == kSumWarps - 1 && chunk < lists.chunks) lists.begin[head * (lists.chunks + 1) + chunk] = sum;
}

// Σ over the threads up to this one.
__device__ int2 block_scan(int2 x) {
  __shared__ int2 totals[kScanThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int step = 1; step < 32; step *= 2) {
    const int2 y{__shfl_up_sync(~0u, x.x, step), __shfl_up_sync(~0u, x.y, step)};
    if (lane >= step) x.x += y.x, x.y += y.y;
  }
  if (lane == 31) totals[warp] = x;
  __syncthreads();
  for (int i = 0; i < warp; ++i) x.x += totals[i].x, x.y += totals[i].y;
  __syncthreads();
  return x;
}

// begin and first from the lengths in begin; the table. A block a key head.
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
    if (c < lists.chunks) begin[c] = items, first[c] = end - segments;
    for (int s = 0; s < segments; ++s)
      table[end - segments + s] = {c, s, items + s * kSegment, min(items_end, items + (s + 1) * kSegment)};
    __syncthreads();
    if (threadIdx.x == kScanThreads - 1) carry = int2{before.x + upto.x, end};
    __syncthreads();
  }
  if (threadIdx.x == 0) begin[lists.chunks] = carry.x, first[lists.chunks] = carry.y;
  for (int s = carry.y + threadIdx.x; s < lists.segments; s += kScanThreads) table[s] = {-1};
}

// Each item to its place: behind those of lower chunks, of earlier runs, and of the same run before it. A warp a run.
__global__ void place_kernel(Top1ChunkForward p, Lists lists, int rank) {
  extern __shared__ int next[];
  const int lane = threadIdx.x, run = blockIdx.x;
  const int64_t head = blockIdx.y;
  for (int c = lane; c < lists.chunks; c += 32)
    next[c] = lists.begin[head * (lists.chunks + 1) + c] + lists.counts[(head * lists.runs + run) * lists.chunks + c];
  __syncwarp();
  const int end = min(lists.items, (run + 1) * lists.run_length);
  for (int first = run * lists.run_length; first < end; first += 32 * kAhead) {
    int choice[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int item = first + i * 32 + lane;
      choice[i] = item < end ? choice_of(p, lists, head, item, rank) : -1;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const unsigned same = __match_any_sync(~0u, choice[i]);
      const int before = __popc(same & ((1u << lane) - 1));
      const int place = choice[i] >= 0 ? next[choice[i]] + before : 0;
      __syncwarp();
      if (choice[i] >= 0) lists.order[head * lists.items + place] = first + i * 32 + lane;
      if (choice[i] >= 0 && before + 1 == __popc(same)) next[choice[i]] = place + 1;
      __syncwarp();
    }
  }
}

}  // namespace

Lists::Lists(const Top1ChunkForward& p, Arena& arena, int most_runs)
    : items(int(p.heads / p.kv_heads * p.time)),
      chunks(int(ceil_div(p.time, p.chunk_size))),
      run_length(int(ceil_div(std::max<int64_t>(512, ceil_div(items, most_runs)), 32) * 32)),
      segments(int(chunks + ceil_div(items, kSegment))) {
  runs = int(ceil_div(items, run_length));
  const int64_t heads = p.batch * p.kv_heads;
  order = arena.take<int>(heads * items);
  begin = arena.take<int>(heads * (chunks + 1)), first = arena.take<int>(heads * (chunks + 1));
  table = arena.take<Segment>(heads * segments), counts = arena.take<int>(heads * runs * chunks);
}

void sort_queries(const Top1ChunkForward& p, const Lists& lists, int rank, cudaStream_t stream) {
  const unsigned heads = unsigned(p.batch * p.kv_heads);
  const size_t bytes = lists.chunks * sizeof(int);
  cudaFuncSetAttribute(count_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
  cudaFuncSetAttribute(place_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
  count_kernel<<<dim3(lists.runs, heads), 32, bytes, stream>>>(p, lists, rank);
  sum_runs_kernel<<<dim3(unsigned(ceil_div(lists.chunks, 32)), heads), 32 * kSumWarps, 0, stream>>>(lists);
  scan_kernel<<<heads, kScanThreads, 0, stream>>>(lists);
  place_kernel<<<dim3(lists.runs, heads), 32, bytes, stream>>>(p, lists, rank);
  check_launch("top1_chunk: sort");
}

}  // namespace assay::ops::cuda::top1
