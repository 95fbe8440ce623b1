// A thread has 16 bytes of a row.
#include <limits>

#include "ops/attention/top1_chunk/join.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/types.cuh"

namespace assay::ops::cuda {
namespace {

__device__ void add(float (&sums)[8], float weight, const uint4& row) {
  const uint32_t pairs[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = unpack_bf16x2(pairs[i]);
    sums[2 * i] += weight * x.x;
    sums[2 * i + 1] += weight * x.y;
  }
}

template <bool kWeighted>
__global__ void __launch_bounds__(256)
    join_kernel(const __grid_constant__ RowsToJoin args, unsigned vectors) {
  const unsigned i = blockIdx.x * 256 + threadIdx.x;
  if (i >= vectors) return;
  const unsigned width = unsigned(args.head_dim) / 8;
  const unsigned row = i / width;
  const unsigned column = i % width;
  const unsigned heads = unsigned(args.heads);
  const unsigned time = unsigned(args.time);
  const unsigned h = row % heads;
  const unsigned token = row / heads;  // b T + t
  const int64_t by_head = (int64_t(token / time) * heads + h) * time + token % time;
  const int top_k = int(args.top_k);
  const int64_t* const place = args.place + int64_t(row) * top_k;
  const auto sum_of = [&](int k) {
    return args.selected[by_head * top_k + k] < 0 ? -INFINITY : args.other_sums[place[k]];
  };
  float whole = 0;
  float own_weight = 1;
  if constexpr (kWeighted) {
    const float own = args.own_sums[int64_t(h) * args.batch * time + token];
    float most = own;
    for (int k = 0; k < top_k; ++k) most = fmaxf(most, sum_of(k));
    float sum = expf(own - most);
    for (int k = 0; k < top_k; ++k) sum += expf(sum_of(k) - most);
    whole = most + logf(sum);
    own_weight = expf(own - whole);
    if (column == 0) args.logsumexp[by_head] = whole;
  }
  float sums[8] = {};
  add(sums, own_weight, static_cast<const uint4*>(args.own)[i]);
  for (int k = 0; k < top_k; ++k) {
    const float weight = kWeighted ? expf(sum_of(k) - whole) : 1;
    if (weight == 0) continue;  // of a chunk that was not chosen, NaN stays out
    add(sums, weight, static_cast<const uint4*>(args.others)[place[k] * width + column]);
  }
  static_cast<uint4*>(args.out)[i] =
      make_uint4(pack_bf16x2(sums[0], sums[1]), pack_bf16x2(sums[2], sums[3]),
                 pack_bf16x2(sums[4], sums[5]), pack_bf16x2(sums[6], sums[7]));
}

}  // namespace

void join_rows(const RowsToJoin& args, Stream stream) {
  const int64_t vectors = args.batch * args.time * args.heads * args.head_dim / 8;
  const bool small = vectors < std::numeric_limits<unsigned>::max() - 256;
  check("join_rows", small ? nullptr : "takes fewer than 2^36 bytes");
  if (vectors > 0)
    launch_threads(args.own_sums ? join_kernel<true> : join_kernel<false>, vectors, 256, stream,
                   args, unsigned(vectors));
}

}  // namespace assay::ops::cuda
