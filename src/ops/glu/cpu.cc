// The gated linear unit on the CPU: a task takes rows, a few hundred numbers of each at a time.
#include "ops/glu/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/glu/cpu.cc"
#include "ops/highway.h"
//
#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {

constexpr int64_t kStretch = 256;

// x, σ(c (x + a x³)) and what the sigmoid's argument changes by, divided by c.
template <class R>
struct Gate {
  Vec<R> sigma, slope;
  HWY_INLINE Gate(Vec<R> x, double c, double a) {
    const Vec<R> square = hn::Mul(x, x);
    sigma = sigmoid(hn::Mul(hn::Mul(x, set<R>(c)), hn::MulAdd(square, set<R>(a), set<R>(1))));
    slope = hn::MulAdd(square, set<R>(3 * a), set<R>(1));
  }
};

// Half a row at a time in R, so that every dtype shares the arithmetic.
template <class R>
struct Stretch {
  alignas(64) R gate[kStretch], up[kStretch], y[kStretch];
};

template <class R, class Body>
void over_rows(const Glu& p, const ParallelFor& parallel, Body&& body) {
  parallel(p.rows, std::max<int64_t>(1, 16384 / p.width), [&](int64_t begin, int64_t end) HWY_ATTR {
    Stretch<R> s;
    for (int64_t row = begin; row < end; ++row)
      for (int64_t first = 0; first < p.width; first += kStretch)
        body(s, row, first, std::min(kStretch, p.width - first));
  });
}
std::byte* at(const void* data, const Glu& p, int64_t row_width, int64_t row, int64_t offset) {
  return element({const_cast<void*>(data), 0, row_width}, p.dtype, 0, row, offset);
}
template <class R>
void read_halves(const Glu& p, int64_t row, int64_t first, int64_t size, Stretch<R>& s) {
  read_row(at(p.h, p, 2 * p.width, row, first), p.dtype, size, kStretch, s.gate);
  read_row(at(p.h, p, 2 * p.width, row, p.width + first), p.dtype, size, kStretch, s.up);
}

template <class R>
void forward(const Glu& p, const ParallelFor& parallel) {
  over_rows<R>(p, parallel, [&](Stretch<R>& s, int64_t row, int64_t first, int64_t size) HWY_ATTR {
    read_halves(p, row, first, size, s);
    fill<R>(s.y, kStretch, [&](int64_t i) HWY_ATTR {
      const Vec<R> x = load(s.gate + i);
      return hn::Mul(hn::Mul(x, Gate<R>(x, p.c, p.a).sigma), load(s.up + i));
    });
    write_row(s.y, p.dtype, size, at(p.y, p, p.width, row, first));
  });
}

template <class R>
void backward(const GluBackward& bwd, const ParallelFor& parallel) {
  const Glu& p = bwd.forward;
  over_rows<R>(p, parallel, [&](Stretch<R>& s, int64_t row, int64_t first, int64_t size) HWY_ATTR {
    read_halves(p, row, first, size, s);
    read_row(at(bwd.dy, p, p.width, row, first), p.dtype, size, kStretch, s.y);
    for (int64_t i = 0; i < kStretch; i += kLanes<R>) {
      const Vec<R> x = load(s.gate + i), dy = load(s.y + i);
      const Gate<R> g(x, p.c, p.a);
      const Vec<R> inner =
          hn::Mul(hn::Mul(x, set<R>(p.c)), hn::Mul(hn::Sub(set<R>(1), g.sigma), g.slope));
      const Vec<R> derivative = hn::MulAdd(g.sigma, inner, g.sigma);
      store<R>(hn::Mul(hn::Mul(dy, load(s.up + i)), derivative), s.gate + i);
      store<R>(hn::Mul(dy, hn::Mul(x, g.sigma)), s.up + i);
    }
    write_row(s.gate, p.dtype, size, at(bwd.dh, p, 2 * p.width, row, first));
    write_row(s.up, p.dtype, size, at(bwd.dh, p, 2 * p.width, row, p.width + first));
  });
}

void glu_forward(const Glu& p, const ParallelFor& parallel) {
  p.dtype == DType::f64 ? forward<double>(p, parallel) : forward<float>(p, parallel);
}
void glu_backward(const GluBackward& bwd, const ParallelFor& parallel) {
  bwd.forward.dtype == DType::f64 ? backward<double>(bwd, parallel)
                                  : backward<float>(bwd, parallel);
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
