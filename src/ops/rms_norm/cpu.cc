// The root-mean-square norm on the CPU: a task takes blocks of rows, a row at a time in a buffer.
#include "ops/rms_norm/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/rms_norm/cpu.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
//
#include <hwy/aligned_allocator.h>

#include <cmath>

#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {

constexpr int64_t kBlockRows = 64;  // rows whose part of dweight is summed together

template <class R>
int64_t padded_width(const RmsNorm& p) {
  return (p.width + kLanes<R> - 1) / kLanes<R> * kLanes<R>;
}
inline int64_t num_blocks(const RmsNorm& p) { return (p.rows + kBlockRows - 1) / kBlockRows; }
inline std::byte* row_at(const void* data, const RmsNorm& p, int64_t row) {
  return element({const_cast<void*>(data), 0, p.width}, p.dtype, 0, row, 0);
}

// A row of x, one of dy, the weight: padded with zeros, which add nothing to a sum.
template <class R>
struct Rows {
  int64_t padded;
  hwy::AlignedFreeUniquePtr<R[]> memory;
  R *x, *dy, *weight;
  explicit Rows(const RmsNorm& p) : padded(padded_width<R>(p)), memory(hwy::AllocateAligned<R>(size_t(3 * padded))) {
    x = memory.get(), dy = x + padded, weight = dy + padded;
    read_row(static_cast<const std::byte*>(p.weight), sizeof(R) == 8 ? DType::f64 : DType::f32, p.width, padded, weight);
  }
};

template <class R, class Term>
HWY_INLINE R sum_over(int64_t padded, Term term) {
  Vec<R> total = hn::Zero(Lanes<R>());
  for (int64_t i = 0; i < padded; i += kLanes<R>) total = hn::Add(total, term(i));
  return sum<R>(total);
}

template <class R>
void forward_row(const RmsNorm& p, int64_t row, Rows<R>& r) {
  read_row(row_at(p.x, p, row), p.dtype, p.width, r.padded, r.x);
  const R squares = sum_over<R>(r.padded, [&](int64_t i) HWY_ATTR { return hn::Mul(load(r.x + i), load(r.x + i)); });
  const R scale = R(1) / std::sqrt(squares / R(p.width) + R(p.eps));
  static_cast<R*>(p.scale)[row] = scale;
  fill<R>(r.x, r.padded, [&](int64_t i) HWY_ATTR { return hn::Mul(hn::Mul(load(r.x + i), hn::Set(Lanes<R>(), scale)), load(r.weight + i)); });
  write_row(r.x, p.dtype, p.width, row_at(p.y, p, row));
}

template <class R>
void backward_row(const RmsNormBackward& q, int64_t row, Rows<R>& r, R* dweight) {
  const RmsNorm& p = q.forward;
  read_row(row_at(p.x, p, row), p.dtype, p.width, r.padded, r.x);
  read_row(row_at(q.dy, p, row), p.dtype, p.width, r.padded, r.dy);
  const R scale = static_cast<const R*>(p.scale)[row];
  const R inner = sum_over<R>(r.padded, [&](int64_t i) HWY_ATTR { return hn::Mul(hn::Mul(load(r.x + i), load(r.weight + i)), load(r.dy + i)); });
  const Vec<R> s = hn::Set(Lanes<R>(), scale), back = hn::Set(Lanes<R>(), scale * scale * scale * inner / R(p.width));
  for (int64_t i = 0; i < r.padded; i += kLanes<R>) {
    const Vec<R> x = load(r.x + i), dy = load(r.dy + i);
    store<R>(hn::MulAdd(hn::Mul(s, x), dy, load(dweight + i)), dweight + i);
    store<R>(hn::NegMulAdd(x, back, hn::Mul(s, hn::Mul(load(r.weight + i), dy))), r.x + i);
  }
  write_row(r.x, p.dtype, p.width, row_at(q.dx, p, row));
}

template <class R>
void forward(const RmsNorm& p, const ParallelFor& parallel) {
  parallel(p.rows, std::max<int64_t>(1, 16384 / p.width), [&](int64_t begin, int64_t end) HWY_ATTR {
    Rows<R> r(p);
    for (int64_t row = begin; row < end; ++row) forward_row(p, row, r);
  });
}

template <class R>
R* parts_of(const RmsNormBackward& q, void* workspace, size_t* bytes = nullptr) {
  Carver carver(static_cast<std::byte*>(workspace));
  R* parts = carver.take<R>(num_blocks(q.forward) * padded_width<R>(q.forward));
  if (bytes) *bytes = carver.used();
  return parts;
}

template <class R>
void backward(const RmsNormBackward& q, void* workspace, const ParallelFor& parallel) {
  const RmsNorm& p = q.forward;
  const int64_t padded = padded_width<R>(p);
  R* parts = parts_of<R>(q, workspace);
  parallel(num_blocks(p), 1, [&](int64_t begin, int64_t end) HWY_ATTR {
    Rows<R> r(p);
    for (int64_t block = begin; block < end; ++block) {
      R* dweight = parts + block * padded;
      std::fill(dweight, dweight + padded, R(0));
      for (int64_t row = block * kBlockRows; row < std::min(p.rows, (block + 1) * kBlockRows); ++row) backward_row(q, row, r, dweight);
    }
  });
  for (int64_t block = 1; block < num_blocks(p); ++block)
    for (int64_t i = 0; i < padded; ++i) parts[i] += parts[block * padded + i];
  std::copy_n(parts, p.width, static_cast<R*>(q.dweight));
}

size_t rms_norm_bytes(const RmsNormBackward& q) {
  size_t bytes = 0;
  q.forward.dtype == DType::f64 ? (void)parts_of<double>(q, nullptr, &bytes) : (void)parts_of<float>(q, nullptr, &bytes);
  return bytes;
}
void rms_norm_forward(const RmsNorm& p, const ParallelFor& parallel) {
  p.dtype == DType::f64 ? forward<double>(p, parallel) : forward<float>(p, parallel);
}
void rms_norm_backward(const RmsNormBackward& q, void* workspace, const ParallelFor& parallel) {
  q.forward.dtype == DType::f64 ? backward<double>(q, workspace, parallel) : backward<float>(q, workspace, parallel);
}

}  // namespace
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace assay::ops {
HWY_EXPORT(rms_norm_bytes);
HWY_EXPORT(rms_norm_forward);
HWY_EXPORT(rms_norm_backward);
namespace cpu {
size_t workspace_bytes(const RmsNormBackward& q) { return HWY_DYNAMIC_DISPATCH(rms_norm_bytes)(q); }
void rms_norm(const RmsNorm& p, const ParallelFor& parallel) { HWY_DYNAMIC_DISPATCH(rms_norm_forward)(p, parallel); }
void rms_norm(const RmsNormBackward& q, void* workspace, const ParallelFor& parallel) {
  HWY_DYNAMIC_DISPATCH(rms_norm_backward)(q, workspace, parallel);
}
}  // namespace cpu
}  // namespace assay::ops
#endif
