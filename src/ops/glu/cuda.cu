// The gated linear unit on CUDA: one pass, 16 bytes of a half row per thread.
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/math.cuh"
#include "ops/glu/kernel.h"

namespace assay::ops::cuda {
namespace {

template <class R>
struct Gate {
  R sigma, value, derivative;  // σ(c (x + a x³)), x σ, and the derivative of x σ
  __device__ Gate(R x, R c, R a)
      : sigma(sigmoid(c * x * (1 + a * x * x))),
        value(x * sigma),
        derivative(sigma + value * (1 - sigma) * c * (1 + 3 * a * x * x)) {}
};

// `pack` numbers of [rows, width], and where they lie in [rows, 2 width].
struct Place {
  int64_t half, gate, up;
};
__device__ Place place(int64_t pack, int64_t width) {
  const int64_t row = pack / width, column = pack % width;  // in packs
  return {pack, row * 2 * width + column, row * 2 * width + width + column};
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kElementwiseThreads) glu_forward(Glu p, int64_t packs) {
  using Packed = Vec<T, kWidth>;
  const int64_t i = blockIdx.x * int64_t{kElementwiseThreads} + threadIdx.x;
  if (i >= packs) return;
  const Place at = place(i, p.width / kWidth);
  const auto* h = static_cast<const Packed*>(p.h);
  Packed g = h[at.gate];
  const Packed u = h[at.up];
  for (int k = 0; k < kWidth; ++k)
    g.at[k] =
        from_compute<T>(Gate<Real<T>>(to_compute(g.at[k]), p.c, p.a).value * to_compute(u.at[k]));
  static_cast<Packed*>(p.y)[at.half] = g;
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kElementwiseThreads)
    glu_backward(GluBackward bwd, int64_t packs) {
  using Packed = Vec<T, kWidth>;
  const Glu& p = bwd.forward;
  const int64_t i = blockIdx.x * int64_t{kElementwiseThreads} + threadIdx.x;
  if (i >= packs) return;
  const Place at = place(i, p.width / kWidth);
  const auto* h = static_cast<const Packed*>(p.h);
  Packed g = h[at.gate], u = h[at.up];
  const Packed dy = static_cast<const Packed*>(bwd.dy)[at.half];
  for (int k = 0; k < kWidth; ++k) {
    const Gate<Real<T>> gate(to_compute(g.at[k]), p.c, p.a);
    const Real<T> up = to_compute(u.at[k]), d = to_compute(dy.at[k]);
    g.at[k] = from_compute<T>(d * up * gate.derivative);
    u.at[k] = from_compute<T>(d * gate.value);
  }
  auto* dh = static_cast<Packed*>(bwd.dh);
  dh[at.gate] = g;
  dh[at.up] = u;
}

}  // namespace

void glu(const Glu& p, Stream stream) {
  with_vectors(p.dtype, p.width, {p.h, p.y}, [&]<class T>(T, auto size) {
    const int64_t packs = p.rows * p.width / size();
    launch_threads(glu_forward<T, size()>, packs, kElementwiseThreads, stream, p, packs);
  });
}

void glu(const GluBackward& bwd, Stream stream) {
  const Glu& p = bwd.forward;
  with_vectors(p.dtype, p.width, {p.h, bwd.dy, bwd.dh}, [&]<class T>(T, auto size) {
    const int64_t packs = p.rows * p.width / size();
    launch_threads(glu_backward<T, size()>, packs, kElementwiseThreads, stream, bwd, packs);
  });
}

}  // namespace assay::ops::cuda
