// Norms on CUDA: up to 32 lanes per part of a row; of few parts, one block per part. The backward
// pass is row-wise.
#include <bit>

#include "ops/cuda/math.cuh"
#include "ops/cuda/rowwise.cuh"
#include "ops/rowwise/norm/kernel.h"

namespace assay::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxPacks = 512;  // packs of a part that a block keeps

int64_t num_parts(const Norm& args) { return args.rows * args.groups; }

// A part of a row belongs to `lanes` lanes with kPacks packs each, which stay in registers; with
// kPacks = 0 it is longer, and the lanes read it again.
template <class T, int kWidth, bool kCentred, int kPacks>
__global__ void __launch_bounds__(kThreads) forward_kernel(Norm args, int lanes) {
  using R = Real<T>;
  using Packed = Vec<T, kWidth>;
  using Weights = Vec<R, kWidth>;
  griddep_launch_dependents();
  griddep_wait();
  const int64_t wanted = blockIdx.x * int64_t(kThreads / lanes) + threadIdx.x / unsigned(lanes);
  const int64_t part = min(wanted, args.rows * args.groups - 1);
  const int64_t packs = args.width / kWidth;
  const int64_t group = part - quotient(part, args.groups) * args.groups;
  const int lane = threadIdx.x & (lanes - 1);
  const auto* x =
      reinterpret_cast<const Packed*>(static_cast<const T*>(args.x) + part * args.width);
  const auto* added =
      reinterpret_cast<const Packed*>(static_cast<const T*>(args.added) + part * args.width);
  auto* sum = reinterpret_cast<Packed*>(static_cast<T*>(args.sum) + part * args.width);
  auto* y = reinterpret_cast<Packed*>(static_cast<T*>(args.y) + part * args.width);
  const auto at = [&](int64_t i) {
    Packed some = x[i];
    if (!args.added) return some;
    const Packed more = added[i];
    for (int k = 0; k < kWidth; ++k)
      some.at[k] = from_compute<T>(to_compute(some.at[k]) + to_compute(more.at[k]));
    return some;
  };
  Packed kept[kPacks > 0 ? kPacks : 1];
#pragma unroll
  for (int j = 0; j < kPacks; ++j)
    if (lane + j * lanes < packs) kept[j] = at(lane + j * lanes);
  // f(index of a pack, the pack)
  const auto each_pack = [&](auto&& f) {
#pragma unroll
    for (int j = 0; j < kPacks; ++j)
      if (lane + j * lanes < packs) f(lane + j * lanes, kept[j]);
    if (kPacks == 0)
      for (int64_t i = lane; i < packs; i += lanes) f(i, at(i));
  };
  R mean = 0;
  R squares = 0;
  if (kCentred) {
    each_pack([&](int64_t, const Packed& some) {
      for (int k = 0; k < kWidth; ++k) mean += to_compute(some.at[k]);
    });
    mean = group_sum(mean, lanes) / R(args.width);
  }
  each_pack([&](int64_t, const Packed& some) {
    for (int k = 0; k < kWidth; ++k)
      squares += (to_compute(some.at[k]) - mean) * (to_compute(some.at[k]) - mean);
  });
  const R scale = rsqrt(group_sum(squares, lanes) / R(args.width) + R(args.eps));
  if (part < wanted) return;
  if (lane == 0) static_cast<R*>(args.scale)[part] = scale;
  if (kCentred && lane == 0) static_cast<R*>(args.mean)[part] = mean;
  const auto* weight = reinterpret_cast<const Weights*>(args.weight) + group * packs;
  const auto* bias = reinterpret_cast<const Weights*>(args.bias) + group * packs;
  each_pack([&](int64_t i, Packed some) {
    if (args.sum) sum[i] = some;
    const Weights w = weight[i];
    const Weights b = kCentred ? bias[i] : Weights{};
    for (int k = 0; k < kWidth; ++k)
      some.at[k] = from_compute<T>((to_compute(some.at[k]) - mean) * scale * w.at[k] + b.at[k]);
    y[i] = some;
  });
}

// The sum over the threads of a block, in all of them.
template <class R>
__device__ R block_sum(R x) {
  __shared__ R sums[32];
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  R sum = sums[0];
  for (int warp = 1; warp < blockDim.x / 32; ++warp) sum += sums[warp];
  return sum;
}

// One block per part, one thread per pack: every thread waits for memory once.
template <class T, int kWidth, bool kCentred>
__global__ void __launch_bounds__(kMaxPacks) few_parts_kernel(Norm args) {
  using R = Real<T>;
  using Packed = Vec<T, kWidth>;
  const int64_t part = blockIdx.x;
  const int64_t column = threadIdx.x * int64_t{kWidth};
  const int64_t element = part * args.width + column;
  const bool inside = column < args.width;
  const R* const weight =
      static_cast<const R*>(args.weight) + part % args.groups * args.width + column;
  const R* const bias = static_cast<const R*>(args.bias) + part % args.groups * args.width + column;
  if (inside) prefetch_l2(weight);
  if (inside && kCentred) prefetch_l2(bias);
  griddep_launch_dependents();
  griddep_wait();
  R x[kWidth] = {};
  R w[kWidth] = {};
  R b[kWidth] = {};
  if (inside) {
    const auto at = [&](const void* from) {
      return *reinterpret_cast<const Packed*>(static_cast<const T*>(from) + element);
    };
    Packed sum = at(args.x);
    Packed added{};
    if (args.added) added = at(args.added);
    for (int k = 0; k < kWidth; ++k) {
      w[k] = weight[k];
      if (kCentred) b[k] = bias[k];
      if (args.added) sum.at[k] = from_compute<T>(to_compute(sum.at[k]) + to_compute(added.at[k]));
      x[k] = to_compute(sum.at[k]);
    }
    if (args.sum) *reinterpret_cast<Packed*>(static_cast<T*>(args.sum) + element) = sum;
  }
  R mean = 0;
  R squares = 0;
  if (kCentred) {
    for (int k = 0; k < kWidth; ++k) mean += x[k];
    mean = block_sum(mean) / R(args.width);
  }
  for (int k = 0; k < kWidth; ++k)
    if (inside) squares += (x[k] - mean) * (x[k] - mean);
  const R scale = rsqrt(block_sum(squares) / R(args.width) + R(args.eps));
  if (threadIdx.x == 0) static_cast<R*>(args.scale)[part] = scale;
  if (kCentred && threadIdx.x == 0) static_cast<R*>(args.mean)[part] = mean;
  if (!inside) return;
  Packed y;
  for (int k = 0; k < kWidth; ++k)
    y.at[k] = from_compute<T>((x[k] - mean) * scale * w[k] + (kCentred ? b[k] : R(0)));
  *reinterpret_cast<Packed*>(static_cast<T*>(args.y) + element) = y;
}

// f(a number of T, a pack's width as a constant, is it layer norm): 16 bytes where rows and
// pointers allow it.
template <class F>
void with_case(const Norm& args, std::initializer_list<const void*> pointers, F&& f) {
  with_vectors(args.dtype, args.width, pointers, [&](auto x, auto width) {
    args.bias ? f(x, width, std::true_type()) : f(x, width, std::false_type());
  });
}

template <bool kCentred, bool kSum>
RowwiseBackward<NormGradient<kCentred, kSum>> gradient(const NormBackward& bwd) {
  const Norm& args = bwd.forward;
  RowwiseBackward<NormGradient<kCentred, kSum>> out{{args.dtype,
                                                     args.rows,
                                                     args.groups,
                                                     args.width,
                                                     args.eps,
                                                     {args.x},
                                                     {args.groups * args.width},
                                                     args.weight,
                                                     {args.scale}},
                                                    {bwd.dy},
                                                    {bwd.dx},
                                                    {args.groups * args.width},
                                                    bwd.dparameters};
  if constexpr (kCentred) out.forward.statistics[1] = args.mean;
  if constexpr (kSum) out.dout[1] = bwd.dsum;
  return out;
}
// f(the arguments of the row-wise gradient).
template <class F>
auto with_gradient(const NormBackward& bwd, F&& f) {
  if (bwd.dsum)
    return bwd.forward.bias ? f(gradient<true, true>(bwd)) : f(gradient<false, true>(bwd));
  return bwd.forward.bias ? f(gradient<true, false>(bwd)) : f(gradient<false, false>(bwd));
}

}  // namespace

size_t workspace_bytes(const NormBackward& bwd) {
  return with_gradient(bwd, [](const auto& rows) { return workspace_bytes(rows); });
}

void norm(const Norm& args, Stream stream) {
  with_case(args, {args.x, args.y, args.added, args.sum, args.weight, args.bias},
            [&](auto x, auto width, auto centred) {
              const int64_t packs = args.width / width();
              if (num_parts(args) <= kFewParts && packs <= kMaxPacks)
                return launch_pdl(few_parts_kernel<decltype(x), width(), centred()>,
                                  unsigned(num_parts(args)), unsigned(ceil_div(packs, 32) * 32), 0,
                                  stream, args);
              const int lanes = int(std::bit_ceil(uint64_t(std::min<int64_t>(packs, 32))));
              const int64_t per_lane = ceil_div(packs, lanes);
              const int kept = per_lane > 8 ? 0 : int(std::bit_ceil(uint64_t(per_lane)));
              with_constant<0, 1, 2, 4, 8>(kept, [&](auto count) {
                launch_pdl(forward_kernel<decltype(x), width(), centred(), count()>,
                           unsigned(ceil_div(num_parts(args), kThreads / lanes)), kThreads, 0,
                           stream, args, lanes);
              });
            });
}

void norm(const NormBackward& bwd, void* workspace, Stream stream) {
  with_gradient(bwd, [&](const auto& rows) { rowwise(rows, workspace, stream); });
}

}  // namespace assay::ops::cuda
