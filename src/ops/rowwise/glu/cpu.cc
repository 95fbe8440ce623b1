// The gated linear unit on the CPU: a task takes rows, a vector at a time.
#include "ops/rowwise/glu/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/rowwise/glu/cpu.cc"
#include "ops/cpu/highway.h"
//
#include <array>

#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {

// x, σ(c (x + a x³)) and what the sigmoid's argument changes by, divided by c.
template <class R>
struct Gate {
  Vec<R> sigma;
  Vec<R> slope;
  HWY_INLINE Gate(Vec<R> x, double c, double a) {
    const Vec<R> square = hn::Mul(x, x);
    sigma = sigmoid(hn::Mul(hn::Mul(x, set<R>(c)), hn::MulAdd(square, set<R>(a), set<R>(1))));
    slope = hn::MulAdd(square, set<R>(3 * a), set<R>(1));
  }
};

// Applies f to a row of inputs, a vector at a time, and writes a row of outputs. The rest of a row,
// less than a vector, goes through a buffer.
template <int inputs, int outputs, class W, class F>
HWY_INLINE void over_row(int64_t width, const std::array<const W*, inputs>& in,
                         const std::array<W*, outputs>& out, F f) {
  constexpr int64_t kVector = sizeof(W) == 8 ? kLanes<double> : kLanes<float>;
  int64_t i = 0;
  for (; i + kVector <= width; i += kVector) {
    const auto results = f([&](int n) HWY_ATTR { return load_wide(in[n] + i); });
    for (int n = 0; n < outputs; ++n) store_narrow(results.at[n], out[n] + i);
  }
  if (i == width) return;
  W buffers[inputs][kVector] = {};
  W last[kVector];
  for (int n = 0; n < inputs; ++n) std::copy(in[n] + i, in[n] + width, buffers[n]);
  const auto results = f([&](int n) HWY_ATTR { return load_wide(buffers[n]); });
  for (int n = 0; n < outputs; ++n) {
    store_narrow(results.at[n], last);
    std::copy_n(last, width - i, out[n] + i);
  }
}

template <class R, int count>
struct Results {
  Vec<R> at[count];
};

template <class Body>
void over_rows(const Glu& p, const ParallelFor& parallel, Body&& body) {
  parallel(p.rows, std::max<int64_t>(1, 16384 / p.width), [&](int64_t begin, int64_t end) HWY_ATTR {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

template <class R, class W>
void forward(const Glu& p, const ParallelFor& parallel) {
  over_rows(p, parallel, [&](int64_t row) HWY_ATTR {
    const W* h = static_cast<const W*>(p.h) + 2 * row * p.width;
    over_row<2, 1, W>(p.width, {h, h + p.width}, {static_cast<W*>(p.y) + row * p.width},
                      [&](auto in) HWY_ATTR {
                        const Vec<R> x = in(0);
                        const Vec<R> y = hn::Mul(x, Gate<R>(x, p.c, p.a).sigma);
                        return Results<R, 1>{{hn::Mul(y, in(1))}};
                      });
  });
}

template <class R, class W>
void backward(const GluBackward& bwd, const ParallelFor& parallel) {
  const Glu& p = bwd.forward;
  over_rows(p, parallel, [&](int64_t row) HWY_ATTR {
    const W* h = static_cast<const W*>(p.h) + 2 * row * p.width;
    const W* dy = static_cast<const W*>(bwd.dy) + row * p.width;
    W* dh = static_cast<W*>(bwd.dh) + 2 * row * p.width;
    over_row<3, 2, W>(p.width, {h, h + p.width, dy}, {dh, dh + p.width}, [&](auto in) HWY_ATTR {
      const Vec<R> x = in(0);
      const Vec<R> dy = in(2);
      const Gate<R> g(x, p.c, p.a);
      const Vec<R> inner =
          hn::Mul(hn::Mul(x, set<R>(p.c)), hn::Mul(hn::Sub(set<R>(1), g.sigma), g.slope));
      const Vec<R> derivative = hn::MulAdd(g.sigma, inner, g.sigma);
      return Results<R, 2>{
          {hn::Mul(hn::Mul(dy, in(1)), derivative), hn::Mul(dy, hn::Mul(x, g.sigma))}};
    });
  });
}

void glu_forward(const Glu& p, const ParallelFor& parallel) {
  p.dtype == DType::f64   ? forward<double, double>(p, parallel)
  : p.dtype == DType::f32 ? forward<float, float>(p, parallel)
                          : forward<float, uint16_t>(p, parallel);
}
void glu_backward(const GluBackward& bwd, const ParallelFor& parallel) {
  const DType dtype = bwd.forward.dtype;
  dtype == DType::f64   ? backward<double, double>(bwd, parallel)
  : dtype == DType::f32 ? backward<float, float>(bwd, parallel)
                        : backward<float, uint16_t>(bwd, parallel);
}

}  // namespace
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace assay::ops::cpu {
ASSAY_CPU_KERNEL(glu, glu_forward, Glu)
ASSAY_CPU_KERNEL(glu, glu_backward, GluBackward)
}  // namespace assay::ops::cpu
#endif
