// Element-wise operators on the CPU. Compiled once per Highway target: the loops below are
// vectorised by the compiler for that target.
#if defined(ASSAY_OPS_ELEMENTWISE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASSAY_OPS_ELEMENTWISE_INL_H_
#undef ASSAY_OPS_ELEMENTWISE_INL_H_
#else
#define ASSAY_OPS_ELEMENTWISE_INL_H_
#endif

#include "ops/core/elementwise.h"
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {

// body(offset, count) for parts of at most kElementwisePart elements.
constexpr int64_t kElementwisePart = 256;
template <class Body>
void for_each_part(int64_t size, const ParallelFor& parallel, const Body& body) {
  parallel((size + kElementwisePart - 1) / kElementwisePart, 64,
           [&](int64_t begin, int64_t end) HWY_ATTR {
             for (int64_t part = begin; part < end; ++part) {
               const int64_t first = part * kElementwisePart;
               body(first, std::min(kElementwisePart, size - first));
             }
           });
}
inline std::byte* element(const void* data, DType dtype, int64_t i) {
  return element({const_cast<void*>(data), 0, 0}, dtype, 0, 0, i);
}

template <class R, class F>
void elementwise_forward(const Elementwise<F>& p, const ParallelFor& parallel) {
  for_each_part(p.size, parallel, [&](int64_t first, int64_t count) HWY_ATTR {
    alignas(64) R x[kElementwisePart];
    read_row(element(p.x, p.dtype, first), p.dtype, count, kElementwisePart, x);
    for (R& value : x) value = F::forward(value);
    write_row(x, p.dtype, count, element(p.y, p.dtype, first));
  });
}
template <class R, class F>
void elementwise_backward(const ElementwiseBackward<F>& bwd, const ParallelFor& parallel) {
  const Elementwise<F>& p = bwd.forward;
  for_each_part(p.size, parallel, [&](int64_t first, int64_t count) HWY_ATTR {
    alignas(64) R x[kElementwisePart];
    alignas(64) R dy[kElementwisePart];
    read_row(element(p.x, p.dtype, first), p.dtype, count, kElementwisePart, x);
    read_row(element(bwd.dy, p.dtype, first), p.dtype, count, kElementwisePart, dy);
    for (int64_t i = 0; i < kElementwisePart; ++i) x[i] = F::backward(x[i], dy[i]);
    write_row(x, p.dtype, count, element(bwd.dx, p.dtype, first));
  });
}

// The functions of one operator that are compiled once per target, and their export under HWY_ONCE.
#define ASSAY_ELEMENTWISE_TARGET(F)                                                   \
  HWY_BEFORE_NAMESPACE();                                                             \
  namespace assay::ops::HWY_NAMESPACE {                                               \
  void F##_forward(const Elementwise<F>& p, const ParallelFor& parallel) {            \
    p.dtype == DType::f64 ? elementwise_forward<double>(p, parallel)                  \
                          : elementwise_forward<float>(p, parallel);                  \
  }                                                                                   \
  void F##_backward(const ElementwiseBackward<F>& bwd, const ParallelFor& parallel) { \
    bwd.forward.dtype == DType::f64 ? elementwise_backward<double>(bwd, parallel)     \
                                    : elementwise_backward<float>(bwd, parallel);     \
  }                                                                                   \
  }                                                                                   \
  HWY_AFTER_NAMESPACE();
#define ASSAY_ELEMENTWISE_EXPORT(F)                                                       \
  namespace assay::ops {                                                                  \
  HWY_EXPORT(F##_forward);                                                                \
  HWY_EXPORT(F##_backward);                                                               \
  template <>                                                                             \
  void cpu::elementwise(const Elementwise<F>& p, const ParallelFor& parallel) {           \
    HWY_DYNAMIC_DISPATCH(F##_forward)(p, parallel);                                       \
  }                                                                                       \
  template <>                                                                             \
  void cpu::elementwise(const ElementwiseBackward<F>& bwd, const ParallelFor& parallel) { \
    HWY_DYNAMIC_DISPATCH(F##_backward)(bwd, parallel);                                    \
  }                                                                                       \
  }

}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
