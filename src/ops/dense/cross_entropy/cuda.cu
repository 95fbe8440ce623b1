// Softmax cross-entropy on CUDA: one block per row. The row is read twice, the second time from
// the L2 cache.
#include "ops/cuda/launch.cuh"
#include "ops/cuda/math.cuh"
#include "ops/dense/cross_entropy/kernel.h"

namespace assay::ops::cuda {
namespace {

constexpr int kThreads = 512;

// Largest value so far, and the sum of exp(value − largest).
template <class R>
struct Running {
  R most = -INFINITY;
  R sum = 0;
  __device__ void add(const Running& other) {
    const R larger = max(most, other.most);
    if (larger == -INFINITY) {
      sum += other.sum;  // 0, or NaN if a logit is NaN
      return;
    }
    sum = sum * exp_intrinsic(most - larger) + other.sum * exp_intrinsic(other.most - larger);
    most = larger;
  }
};

template <class R>
__device__ Running<R> over_block(Running<R> mine) {
  __shared__ Running<R> warps[kThreads / 32];
  const auto fold = [&](int width) {
    for (int step = width / 2; step > 0; step /= 2)
      mine.add({__shfl_xor_sync(~0u, mine.most, step), __shfl_xor_sync(~0u, mine.sum, step)});
  };
  fold(32);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  mine = warps[threadIdx.x % (kThreads / 32)];
  fold(kThreads / 32);
  return mine;
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) cross_entropy_kernel(CrossEntropy args) {
  using R = Real<T>;
  using Packed = Vec<T, kWidth>;
  const int64_t row = blockIdx.x;
  const int64_t packs = args.classes / kWidth;
  const int64_t target = args.targets[row];
  T* logits = static_cast<T*>(args.logits) + row * args.classes;
  auto* packed = reinterpret_cast<Packed*>(logits);
  const bool inside = target >= 0 && target < args.classes;
  const R chosen = inside ? to_compute(logits[target]) : R(NAN);
  Running<R> mine;
  for (int64_t i = threadIdx.x; i < packs; i += kThreads) {
    const Packed x = packed[i];
    Running<R> part;
    for (int k = 0; k < kWidth; ++k) part.most = max(part.most, to_compute(x.at[k]));
    const R origin = part.most == -INFINITY ? R(0) : part.most;  // −∞ − −∞ would be NaN
    for (int k = 0; k < kWidth; ++k) part.sum += exp_intrinsic(to_compute(x.at[k]) - origin);
    mine.add(part);
  }
  const Running<R> all = over_block(mine);
  if (threadIdx.x == 0) static_cast<R*>(args.losses)[row] = log(all.sum) + (all.most - chosen);
  if (!args.gradient) return;
  const R factor = inside ? R(args.scale) / all.sum : R(NAN);
  for (int64_t i = threadIdx.x; i < packs; i += kThreads) {
    Packed x = packed[i];
    for (int k = 0; k < kWidth; ++k) {
      const R g = factor * exp_intrinsic(to_compute(x.at[k]) - all.most);
      x.at[k] = from_compute<T>(i * kWidth + k == target ? g - R(args.scale) : g);
    }
    packed[i] = x;
  }
}

}  // namespace

void cross_entropy(const CrossEntropy& args, Stream stream) {
  if (args.rows == 0) return;
  with_vectors(args.dtype, args.classes, {args.logits}, [&]<class T>(T, auto width) {
    launch_kernel(cross_entropy_kernel<T, width()>, unsigned(args.rows), kThreads, 0, stream, args);
  });
}

}  // namespace assay::ops::cuda
