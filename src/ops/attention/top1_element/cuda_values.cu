// dv: the queries of each key, found by a stable sort, are added in their order by one warp.
#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "ops/attention/top1_element/cuda_passes.cuh"
#include "ops/cuda/attention.cuh"

namespace assay::ops::cuda {
namespace element {
namespace {

int64_t queries_of(const Top1ElementForward& args) { return args.batch * args.heads * args.time; }
int64_t keys_of(const Top1ElementForward& args) {
  return args.batch * args.kv_heads * (args.past + args.time);
}

cudaError_t sort(const Top1ElementForward& args, const Choices& c, void* scratch, size_t& bytes,
                 Stream stream) {
  return cub::DeviceRadixSort::SortPairs(
      scratch, bytes, c.key, c.sorted_key, c.item, c.sorted_item, queries_of(args), 0,
      std::bit_width(uint64_t(keys_of(args))), cuda_stream(stream));
}

__global__ void __launch_bounds__(256)
    list_kernel(Top1ElementForward args, Choices c, int64_t queries) {
  const int64_t i = blockIdx.x * int64_t{256} + threadIdx.x;
  if (i >= queries) return;
  const int64_t kv = i / args.time / (args.heads / args.kv_heads);  // b · Hk + ⌊h / (H/Hk)⌋
  c.key[i] = uint32_t(kv * (args.past + args.time) + args.index[i]);
  c.item[i] = uint32_t(i);
}

// Where each key's queries begin and end.
__global__ void __launch_bounds__(256) bounds_kernel(Choices c, int64_t queries) {
  const int64_t i = blockIdx.x * int64_t{256} + threadIdx.x;
  if (i >= queries) return;
  const uint32_t key = c.sorted_key[i];
  if (i == 0 || c.sorted_key[i - 1] != key) c.begin[key] = uint32_t(i);
  if (i + 1 == queries || c.sorted_key[i + 1] != key) c.end[key] = uint32_t(i + 1);
}

// One warp per key. Lanes hold 8 columns each; as many streams of rows as fit into a warp, joined
// in their order.
template <int D>
__global__ void __launch_bounds__(256)
    sum_kernel(Top1ElementBackward bwd, Choices c, int64_t keys) {
  constexpr int kVectors = D / 8;
  constexpr int kStreams = 32 / kVectors;
  const Top1ElementForward& args = bwd.forward;
  const int64_t key = blockIdx.x * int64_t{8} + threadIdx.x / 32;
  const int64_t size = args.past + args.time;
  if (key >= keys) return;
  const int lane = threadIdx.x % 32;
  const int vector = lane % kVectors;
  const int stream = lane / kVectors;
  const uint32_t begin = c.begin[key];
  const uint32_t end = stream < kStreams ? c.end[key] : begin;
  float sum[8] = {};
#pragma unroll 4
  for (uint32_t i = begin + stream; i < end; i += kStreams) {
    const uint32_t item = c.sorted_item[i];
    const uint32_t head = item / uint32_t(args.time);
    const uint32_t t = item % uint32_t(args.time);
    const bf16* row =
        head_row<D>(bwd.dout, head / uint32_t(args.heads), t, head % uint32_t(args.heads));
    const uint4 x = *reinterpret_cast<const uint4*>(row + vector * 8);
    const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 u = unpack_bf16x2(pairs[e]);
      sum[2 * e] += u.x;
      sum[2 * e + 1] += u.y;
    }
  }
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float own = sum[e];
#pragma unroll
    for (int s = 1; s < kStreams; ++s)
      sum[e] += __shfl_sync(~0u, own, (vector + s * kVectors) % 32);
  }
  if (stream > 0) return;
  const int64_t head = key / size;
  *reinterpret_cast<uint4*>(
      head_row<D>(bwd.dv, head / args.kv_heads, key % size, head % args.kv_heads) + vector * 8) =
      make_uint4(pack_bf16x2(sum[0], sum[1]), pack_bf16x2(sum[2], sum[3]),
                 pack_bf16x2(sum[4], sum[5]), pack_bf16x2(sum[6], sum[7]));
}

}  // namespace

Choices::Choices(const Top1ElementForward& args, WorkspaceArena& arena) {
  for (uint32_t** list : {&key, &item, &sorted_key, &sorted_item})
    *list = arena.take<uint32_t>(queries_of(args));
  begin = arena.take<uint32_t>(keys_of(args));
  end = arena.take<uint32_t>(keys_of(args));
  scratch_bytes = 0;
  check_cuda("top1_element: the size of the sort's scratch",
             sort(args, *this, nullptr, scratch_bytes, nullptr));
  scratch = arena.take<char>(int64_t(scratch_bytes));
}

void value_gradients(const Top1ElementBackward& bwd, const Choices& c, Stream stream) {
  const Top1ElementForward& args = bwd.forward;
  const int64_t queries = queries_of(args);
  const int64_t keys = keys_of(args);
  launch_threads(list_kernel, queries, 256, stream, args, c, queries);
  size_t bytes = c.scratch_bytes;
  check_cuda("top1_element: sort", sort(args, c, c.scratch, bytes, stream));
  for (uint32_t* bound : {c.begin, c.end})
    cudaMemsetAsync(bound, 0, size_t(keys) * sizeof(uint32_t), cuda_stream(stream));
  launch_threads(bounds_kernel, queries, 256, stream, c, queries);
  with_head_dim(args.head_dim, [&](auto d) {
    launch_kernel(sum_kernel<d()>, unsigned(ceil_div(keys, 8)), 256, 0, stream, bwd, c, keys);
  });
}

}  // namespace element

size_t value_gradient_bytes(const Top1ElementBackward& bwd) {
  return workspace_size<element::Choices>(bwd.forward);
}
void value_gradients(const Top1ElementBackward& bwd, void* workspace, Stream stream) {
  element::value_gradients(bwd, workspace_at<element::Choices>(workspace, bwd.forward), stream);
}

}  // namespace assay::ops::cuda
