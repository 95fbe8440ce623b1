#pragma once
// Element-wise operators on CUDA: one pass, 16 bytes per thread. cuda.cu of an operator
// instantiates both functions for its struct.
#include "ops/core/elementwise.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/types.cuh"

namespace assay::ops::cuda {

constexpr int kElementwiseThreads = 256;

// Without dy f(x), with dy the gradient.
template <class F, class T, int kSize>
__global__ void __launch_bounds__(kElementwiseThreads)
    elementwise_kernel(const Vec<T, kSize>* x, const Vec<T, kSize>* dy, Vec<T, kSize>* out,
                       int64_t vectors) {
  const int64_t i = blockIdx.x * int64_t{kElementwiseThreads} + threadIdx.x;
  if (i >= vectors) return;
  Vec<T, kSize> v = x[i];
  Vec<T, kSize> d;
  if (dy) d = dy[i];
  for (int k = 0; k < kSize; ++k)
    v[k] = from_compute<T>(dy ? F::backward(to_compute(v[k]), to_compute(d[k]))
                              : F::forward(to_compute(v[k])));
  out[i] = v;
}

template <class F>
void elementwise(const Elementwise<F>& args, const void* dy, void* out, Stream stream) {
  with_vectors(args.dtype, args.size, {args.x, dy, out}, [&]<class T>(T, auto size) {
    using V = Vec<T, size()>;
    const int64_t vectors = args.size / size();
    launch_threads(elementwise_kernel<F, T, size()>, vectors, kElementwiseThreads, stream,
                   static_cast<const V*>(args.x), static_cast<const V*>(dy), static_cast<V*>(out),
                   vectors);
  });
}
template <class F>
void elementwise(const Elementwise<F>& args, Stream stream) {
  elementwise(args, nullptr, args.y, stream);
}
template <class F>
void elementwise(const ElementwiseBackward<F>& bwd, Stream stream) {
  elementwise(bwd.forward, bwd.dy, bwd.dx, stream);
}

}  // namespace assay::ops::cuda
