#pragma once
// Element-wise operators on CUDA: one pass, 16 bytes per thread. cuda.cu of an operator
// instantiates both functions for its struct.
#include "ops/cuda/launch.cuh"
#include "ops/cuda/types.cuh"
#include "ops/elementwise.h"

namespace assay::ops::cuda {

constexpr int kElementwiseThreads = 256;

template <class F, class T, int kSize>
__global__ void __launch_bounds__(kElementwiseThreads)
    elementwise_forward_kernel(const Vec<T, kSize>* x, Vec<T, kSize>* y, int64_t vectors) {
  const int64_t i = blockIdx.x * int64_t{kElementwiseThreads} + threadIdx.x;
  if (i >= vectors) return;
  Vec<T, kSize> v = x[i];
  for (int k = 0; k < kSize; ++k) v[k] = from_compute<T>(F::forward(to_compute(v[k])));
  y[i] = v;
}
template <class F, class T, int kSize>
__global__ void __launch_bounds__(kElementwiseThreads)
    elementwise_backward_kernel(const Vec<T, kSize>* x, const Vec<T, kSize>* dy, Vec<T, kSize>* dx,
                                int64_t vectors) {
  const int64_t i = blockIdx.x * int64_t{kElementwiseThreads} + threadIdx.x;
  if (i >= vectors) return;
  Vec<T, kSize> v = x[i];
  const Vec<T, kSize> d = dy[i];
  for (int k = 0; k < kSize; ++k)
    v[k] = from_compute<T>(F::backward(to_compute(v[k]), to_compute(d[k])));
  dx[i] = v;
}

template <class F>
void elementwise(const Elementwise<F>& p, Stream stream) {
  with_vectors(p.dtype, p.size, {p.x, p.y}, [&]<class T>(T, auto size) {
    using V = Vec<T, size()>;
    const int64_t vectors = p.size / size();
    launch_threads(elementwise_forward_kernel<F, T, size()>, vectors, kElementwiseThreads, stream,
                   static_cast<const V*>(p.x), static_cast<V*>(p.y), vectors);
  });
}
template <class F>
void elementwise(const ElementwiseBackward<F>& bwd, Stream stream) {
  const Elementwise<F>& p = bwd.forward;
  with_vectors(p.dtype, p.size, {p.x, bwd.dy, bwd.dx}, [&]<class T>(T, auto size) {
    using V = Vec<T, size()>;
    const int64_t vectors = p.size / size();
    launch_threads(elementwise_backward_kernel<F, T, size()>, vectors, kElementwiseThreads, stream,
                   static_cast<const V*>(p.x), static_cast<const V*>(bwd.dy),
                   static_cast<V*>(bwd.dx), vectors);
  });
}

}  // namespace assay::ops::cuda
