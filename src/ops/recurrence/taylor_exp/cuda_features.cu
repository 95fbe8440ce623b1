// The features on CUDA, a block 32 rows, a thread some of their numbers. The floor is bytes: y
// forward, dy backward.
#include "ops/cuda/launch.cuh"
#include "ops/cuda/types.cuh"
#include "ops/recurrence/taylor_exp/kernel.h"

namespace assay::ops::cuda {
namespace {

// threads and rows of a block
constexpr int kThreads = 256;
constexpr int kRows = 32;

// x_i x_j, i ≤ j, comes after all of x_0 … x_{i−1}.
__device__ int place(int i, int j, int K) { return 1 + K + i * (2 * K - i + 1) / 2 + (j - i); }

// f(row, number) for the rows of this block, `width` numbers each.
template <class F>
__device__ void each_number(int64_t rows, int width, const F& f) {
  const int64_t first = blockIdx.x * int64_t{kRows};
  const int count = int(min(int64_t{kRows}, rows - first)) * width;
  for (int n = threadIdx.x; n < count; n += kThreads) f(first + n / width, n % width);
}

template <class T>
__global__ void __launch_bounds__(kThreads) features_forward(TaylorFeatures args, T* y, int F) {
  const int K = int(args.key_dim);
  const float corner = K + 0.5f;
  each_number(args.rows, F, [&](int64_t row, int f) {
    const T* x = static_cast<const T*>(args.x) + row * K;
    Real<T> feature = f == 0 ? 1 : f <= K ? to_compute(x[f - 1]) : 0;
    if (f > K) {
      int i = int(corner - sqrtf(corner * corner - 2 * (f - 1 - K)));  // or a neighbour of it
      while (i > 0 && place(i, i, K) > f) --i;
      while (place(i + 1, i + 1, K) <= f) ++i;
      feature = to_compute(x[i]) * to_compute(x[i + f - place(i, i, K)]);
    }
    if (args.weights) feature *= static_cast<const Real<T>*>(args.weights)[f];
    y[row * F + f] = from_compute<T>(feature);
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    features_backward(TaylorFeatures args, const T* dy, T* dx, int F) {
  const int K = int(args.key_dim);
  const auto* weights = static_cast<const Real<T>*>(args.weights);
  each_number(args.rows, K, [&](int64_t row, int i) {
    const T* x = static_cast<const T*>(args.x) + row * K;
    const T* from = dy + row * F;
    const auto g = [&](int f) {
      return weights ? weights[f] * to_compute(from[f]) : to_compute(from[f]);
    };
    Real<T> sum = g(1 + i) + g(place(i, i, K)) * to_compute(x[i]);
    for (int j = 0; j < K; ++j)
      sum += g(j < i ? place(j, i, K) : place(i, j, K)) * to_compute(x[j]);
    dx[row * K + i] = from_compute<T>(sum);
  });
}

}  // namespace

void taylor_features(const TaylorFeatures& args, void* y, Stream stream) {
  const int F = int(feature_count(args.key_dim));
  with_type(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch_kernel(features_forward<T>, unsigned(ceil_div(args.rows, kRows)), kThreads, 0, stream,
                  args, static_cast<T*>(y), F);
  });
}

void taylor_features(const TaylorFeatures& args, const void* dy, void* dx, Stream stream) {
  with_type(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch_kernel(features_backward<T>, unsigned(ceil_div(args.rows, kRows)), kThreads, 0, stream,
                  args, static_cast<const T*>(dy), static_cast<T*>(dx),
                  int(feature_count(args.key_dim)));
  });
}

}  // namespace assay::ops::cuda
