// Softmax cross-entropy on the CPU: a task takes whole rows, one at a time in a buffer that
// stays in cache.
#include "ops/dense/cross_entropy/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/dense/cross_entropy/cpu.cc"
#include "ops/cpu/highway.h"
//
#include <hwy/aligned_allocator.h>

#include <cmath>
#include <limits>

#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {

constexpr int64_t kStretch = 1024;  // numbers summed in R before the sum goes on in double

template <class R>
R largest(const R* row, int64_t size) {
  Vec<R> most = load(row);
  for (int64_t i = kLanes<R>; i < size; i += kLanes<R>) most = hn::Max(most, load(row + i));
  return hn::GetLane(hn::MaxOfLanes(Lanes<R>(), most));
}

// row ← exp(row − shift); → its sum.
template <class R>
double exponentiate(R* row, int64_t size, R shift) {
  double total = 0;
  for (int64_t begin = 0; begin < size; begin += kStretch) {
    Vec<R> part = hn::Zero(Lanes<R>());
    for (int64_t i = begin; i < std::min(begin + kStretch, size); i += kLanes<R>) {
      const Vec<R> p =
          exp2(hn::Mul(hn::Sub(load(row + i), hn::Set(Lanes<R>(), shift)), set<R>(kLog2E)));
      store<R>(p, row + i);
      part = hn::Add(part, p);
    }
    total += double(sum<R>(part));
  }
  return total;
}

template <class R>
void cross_entropy_row(const CrossEntropy& p, int64_t i, int64_t padded, R* row) {
  const int64_t target = p.targets[i];
  std::byte* logits = element({p.logits, 0, p.classes}, p.dtype, 0, i, 0);
  R* loss = static_cast<R*>(p.losses) + i;
  read_row(logits, p.dtype, p.classes, padded, row);
  std::fill(row + p.classes, row + padded, std::numeric_limits<R>::lowest());
  const R most = largest(row, padded);
  const R chosen = target >= 0 && target < p.classes ? row[target] : R(NAN);
  const double total = exponentiate(row, padded, most);
  *loss = static_cast<R>(std::log(total) + (double(most) - double(chosen)));
  if (!p.gradient) return;
  const R factor = std::isnan(chosen) ? R(NAN) : static_cast<R>(p.scale / total);
  fill<R>(row, padded,
          [&](int64_t j) HWY_ATTR { return hn::Mul(load(row + j), hn::Set(Lanes<R>(), factor)); });
  if (!std::isnan(chosen)) row[target] -= static_cast<R>(p.scale);
  write_row(row, p.dtype, p.classes, logits);
}

template <class R>
void cross_entropy_rows(const CrossEntropy& p, const ParallelFor& parallel) {
  const int64_t padded = (p.classes + kLanes<R> - 1) / kLanes<R> * kLanes<R>;
  parallel(p.rows, std::max<int64_t>(1, 32768 / p.classes),
           [&](int64_t begin, int64_t end) HWY_ATTR {
             const auto row = hwy::AllocateAligned<R>(size_t(padded));
             for (int64_t i = begin; i < end; ++i) cross_entropy_row(p, i, padded, row.get());
           });
}

void run_cross_entropy(const CrossEntropy& p, const ParallelFor& parallel) {
  if (p.dtype == DType::f64) cross_entropy_rows<double>(p, parallel);
  else cross_entropy_rows<float>(p, parallel);
}

}  // namespace
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace assay::ops::cpu {
ASSAY_CPU_KERNEL(cross_entropy, run_cross_entropy, CrossEntropy)
}  // namespace assay::ops::cpu
#endif
