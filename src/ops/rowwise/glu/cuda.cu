// The gated linear unit on CUDA: one pass, 16 bytes of a half row per thread.
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/math.cuh"
#include "ops/rowwise/glu/kernel.h"

namespace assay::ops::cuda {
namespace {

template <class R>
struct Gate {
  // σ(c (x + a x³)), x σ, and the derivative of x σ
  R sigma;
  R value;
  R derivative;
  __device__ Gate(R x, R c, R a)
      : sigma(sigmoid(c * x * (1 + a * x * x))),
        value(x * sigma),
        derivative(sigma + value * (1 - sigma) * c * (1 + 3 * a * x * x)) {}
};

template <class T, int kWidth, bool kBackward>
__global__ void __launch_bounds__(kElementwiseThreads) glu_kernel(GluBackward bwd, int64_t packs) {
  using Packed = Vec<T, kWidth>;
  using R = Real<T>;
  const Glu& args = bwd.forward;
  const int64_t i = blockIdx.x * int64_t{kElementwiseThreads} + threadIdx.x;
  if (i >= packs) return;
  const int64_t width = args.width / kWidth;
  const int64_t gate = i + i / width * width;
  const int64_t up = gate + width;
  Packed g = static_cast<const Packed*>(args.h)[gate];
  Packed u = static_cast<const Packed*>(args.h)[up];
  Packed dy;
  if constexpr (kBackward) dy = static_cast<const Packed*>(bwd.dy)[i];
  for (int k = 0; k < kWidth; ++k) {
    const Gate<R> at(to_compute(g[k]), args.c, args.a);
    const R x = to_compute(u[k]);
    if constexpr (kBackward) {
      const R d = to_compute(dy[k]);
      g[k] = from_compute<T>(d * x * at.derivative);
      u[k] = from_compute<T>(d * at.value);
    } else {
      g[k] = from_compute<T>(at.value * x);
    }
  }
  static_cast<Packed*>(kBackward ? bwd.dh : args.y)[kBackward ? gate : i] = g;
  if constexpr (kBackward) static_cast<Packed*>(bwd.dh)[up] = u;
}

template <bool kBackward>
void launch(const GluBackward& bwd, std::initializer_list<const void*> pointers, Stream stream) {
  const Glu& args = bwd.forward;
  with_vectors(args.dtype, args.width, pointers, [&]<class T>(T, auto size) {
    const int64_t packs = args.rows * args.width / size();
    launch_threads(glu_kernel<T, size(), kBackward>, packs, kElementwiseThreads, stream, bwd,
                   packs);
  });
}

}  // namespace

void glu(const Glu& args, Stream stream) {
  launch<false>({.forward = args}, {args.h, args.y}, stream);
}
void glu(const GluBackward& bwd, Stream stream) {
  launch<true>(bwd, {bwd.forward.h, bwd.dy, bwd.dh}, stream);
}

}  // namespace assay::ops::cuda
