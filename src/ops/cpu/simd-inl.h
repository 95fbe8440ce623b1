// Vector arithmetic of the CPU kernels. Compiled once a Highway target, so the
// include guard toggles.
#if defined(ASSAY_OPS_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASSAY_OPS_SIMD_INL_H_
#undef ASSAY_OPS_SIMD_INL_H_
#else
#define ASSAY_OPS_SIMD_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "ops/core/kernel.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class R>
using Lanes = hn::ScalableTag<R>;
template <class R>
using Vec = hn::Vec<Lanes<R>>;
template <class R>
constexpr int64_t kLanes = hn::MaxLanes(Lanes<R>());
// A tile of channels is what one task walks through time: four vectors, enough independent chains
// to hide latencies.
constexpr int64_t kTileVectors = 4;
template <class R>
constexpr int64_t kTile = kTileVectors * kLanes<R>;

template <class R>
HWY_INLINE Vec<R> set(double x) {
  return hn::Set(Lanes<R>(), static_cast<R>(x));
}

// 2^x. Adding 1.5·2^mantissa rounds x and leaves its integer part in the low bits, which become
// the exponent; the fraction in [−½, ½] goes through a polynomial: for float one fitted to the
// least relative error (1.1e-7), for double Taylor's (4e-18). x is clamped to where the result is
// normal. hn::Min and hn::Max may drop NaN, and the integer part of NaN is arbitrary, so NaN is
// selected at the end.
HWY_INLINE Vec<float> exp2(Vec<float> unclamped) {
  using R = float;
  const Lanes<R> d;
  const hn::RebindToSigned<Lanes<R>> di;
  const Vec<R> x = hn::Min(set<R>(127), hn::Max(set<R>(-126), unclamped));
  const Vec<R> magic = set<R>(12582912);
  const Vec<R> shifted = hn::Add(x, magic);
  const Vec<R> f = hn::Sub(x, hn::Sub(shifted, magic));
  Vec<R> p = hn::MulAdd(f, set<R>(0.0013264727), set<R>(0.009671513));
  p = hn::MulAdd(f, p, set<R>(0.055507336));
  p = hn::MulAdd(f, p, set<R>(0.24022242));
  p = hn::MulAdd(f, p, set<R>(0.693147));
  p = hn::MulAdd(f, p, set<R>(1));
  const Vec<R> power =
      hn::BitCast(d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::BitCast(di, shifted))));
  return hn::IfThenElse(hn::IsNaN(unclamped), unclamped, power);
}
HWY_INLINE Vec<double> exp2(Vec<double> unclamped) {
  using R = double;
  const Lanes<R> d;
  const hn::RebindToSigned<Lanes<R>> di;
  constexpr double kLn2 = 0.693147180559945309;
  const Vec<R> x = hn::Min(set<R>(1023), hn::Max(set<R>(-1022), unclamped));
  const Vec<R> magic = set<R>(6755399441055744);
  const Vec<R> shifted = hn::Add(x, magic);
  const Vec<R> f = hn::Sub(x, hn::Sub(shifted, magic));
  const Vec<R> g = hn::Mul(f, set<R>(kLn2));
  Vec<R> p = set<R>(1);
  for (int k = 13; k > 0; --k) p = hn::MulAdd(hn::Mul(g, set<R>(1.0 / k)), p, set<R>(1));
  const Vec<R> power =
      hn::BitCast(d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<52>(hn::BitCast(di, shifted))));
  return hn::IfThenElse(hn::IsNaN(unclamped), unclamped, power);
}

constexpr double kLog2E = 1.44269504088896341;
template <class V, class R = hn::TFromV<V>>
HWY_INLINE V sigmoid(V x) {
  return hn::Div(set<R>(1), hn::Add(set<R>(1), exp2(hn::Mul(x, set<R>(-kLog2E)))));
}
template <class V, class R = hn::TFromV<V>>
HWY_INLINE V silu(V x) {
  return hn::Mul(x, sigmoid(x));
}
template <class V, class R = hn::TFromV<V>>
HWY_INLINE V silu_slope(V x, V sigmoid) {  // σ + x σ (1 − σ)
  return hn::MulAdd(hn::Mul(x, sigmoid), hn::Sub(set<R>(1), sigmoid), sigmoid);
}
// ln(1 + x) for 0 ≤ x ≤ 1 as 2 artanh(s), s = x / (2 + x) ≤ ⅓: a series in s² that keeps its
// relative accuracy near 0.
template <class V, class R = hn::TFromV<V>>
HWY_INLINE V log1p(V x) {
  // the first term left out is below 2⁻²⁹ and 2⁻⁵⁸ of the sum
  constexpr int kLast = sizeof(R) == 4 ? 7 : 16;
  const V s = hn::Div(x, hn::Add(x, set<R>(2)));
  const V square = hn::Mul(s, s);
  V sum = set<R>(2.0 / (2 * kLast + 1));
  for (int k = kLast - 1; k >= 0; --k) sum = hn::MulAdd(sum, square, set<R>(2.0 / (2 * k + 1)));
  return hn::Mul(s, sum);
}
template <class V, class R = hn::TFromV<V>>
HWY_INLINE V softplus(V x) {
  const V tail = log1p(exp2(hn::Mul(hn::Abs(x), set<R>(-kLog2E))));
  return hn::IfThenElse(hn::Gt(x, set<R>(20)), x, hn::Add(hn::Max(hn::Zero(Lanes<R>()), x), tail));
}
template <class V, class R = hn::TFromV<V>>
HWY_INLINE V softplus_slope(V x) {
  return hn::IfThenElse(hn::Gt(x, set<R>(20)), set<R>(1), sigmoid(x));
}

template <class R>
HWY_INLINE Vec<R> load(const R* at) {
  return hn::Load(Lanes<R>(), at);
}
template <class R>
HWY_INLINE void store(Vec<R> v, R* at) {
  hn::Store(v, Lanes<R>(), at);
}
template <class R>
HWY_INLINE R sum(Vec<R> v) {
  return hn::GetLane(hn::SumOfLanes(Lanes<R>(), v));
}
// The sums of the lanes with the same place in a block of four.
template <class D>
HWY_INLINE hn::Vec<hn::FixedTag<float, 4>> add_blocks(D d, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(d) == 4) {
    return v;
  } else {
    const hn::Half<D> half;
    return add_blocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}
// out[i] = the sum of the lanes of v[i], in an order that does not depend on i.
HWY_INLINE void sums(const Vec<float> (&v)[4], float* out) {
  const Lanes<float> d;
  const hn::Repartition<double, Lanes<float>> pairs;
  const auto add_neighbours = [&](Vec<float> a, Vec<float> b) HWY_ATTR {
    return hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  };
  const auto ab = hn::BitCast(pairs, add_neighbours(v[0], v[1]));
  const auto cd = hn::BitCast(pairs, add_neighbours(v[2], v[3]));
  const Vec<float> of_blocks = hn::Add(hn::BitCast(d, hn::InterleaveLower(pairs, ab, cd)),
                                       hn::BitCast(d, hn::InterleaveUpper(pairs, ab, cd)));
  hn::StoreU(add_blocks(d, of_blocks), hn::FixedTag<float, 4>(), out);
}
HWY_INLINE void sums(const Vec<double> (&v)[4], double* out) {
  for (int i = 0; i < 4; ++i) out[i] = sum<double>(v[i]);
}
// out[i] = f(i-th vector) over `size` numbers, a multiple of the lanes.
template <class R, class F>
HWY_INLINE void fill(R* out, int64_t size, F f) {
  for (int64_t i = 0; i < size; i += kLanes<R>) store<R>(f(i), out + i);
}

// Element (batch, time, offset) of a sequence tensor, and its row of `n` numbers to and from
// the arithmetic's type. Reading pads with zeros to `padded`, so that the loops over a tile
// need no tail.
inline std::byte* element(const View& view, DType dtype, int64_t b, int64_t t, int64_t offset) {
  const int64_t bytes = dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2;
  return static_cast<std::byte*>(view.data) +
         (b * view.batch_stride + t * view.time_stride + offset) * bytes;
}
// Rows of a tile lie far apart, where the hardware does not fetch ahead by itself.
constexpr int64_t kRowsAhead = 8;
template <int kWrite>  // 1 when the row will be written
void prefetch_row(const std::byte* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, kWrite);
}
template <class R>
void read_row(const std::byte* row, DType dtype, int64_t n, int64_t padded, R* out) {
  if (dtype == DType::bf16) {
    const auto* bits = reinterpret_cast<const uint16_t*>(row);
    for (int64_t i = 0; i < n; ++i) out[i] = std::bit_cast<float>(uint32_t{bits[i]} << 16);
  } else {
    std::memcpy(out, row, n * sizeof(R));
  }
  std::fill(out + n, out + padded, R(0));
}
inline uint16_t round_to_bf16(float x) {  // to nearest, ties to even
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
// round_to_bf16 for vectors; the bits are the lower half of each lane.
HWY_INLINE hn::Vec<hn::RebindToUnsigned<Lanes<float>>> bf16_bits(Vec<float> x) {
  const hn::RebindToUnsigned<Lanes<float>> d32;
  const auto bits = hn::BitCast(d32, x);
  const auto upper = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(upper, hn::Set(d32, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(hn::Set(d32, 0x7FFFu), odd)));
  const auto nan = hn::Or(upper, hn::Set(d32, 0x40u));
  return hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(x)), nan, rounded);
}
HWY_INLINE void store_as_bf16(Vec<float> x, uint16_t* out) {
  const hn::Rebind<uint16_t, Lanes<float>> d16;
  hn::StoreU(hn::TruncateTo(d16, bf16_bits(x)), d16, out);
}
// The numbers in the lower and in the upper halves of words of two bfloat16 numbers.
HWY_INLINE Vec<float> lower_bf16(Vec<float> words) {
  const hn::RebindToUnsigned<Lanes<float>> d32;
  return hn::BitCast(Lanes<float>(), hn::ShiftLeft<16>(hn::BitCast(d32, words)));
}
HWY_INLINE Vec<float> upper_bf16(Vec<float> words) {
  const hn::RebindToUnsigned<Lanes<float>> d32;
  return hn::BitCast(Lanes<float>(), hn::And(hn::BitCast(d32, words), hn::Set(d32, 0xFFFF0000u)));
}
// Numbers where they are in memory, from and to vectors of the arithmetic.
HWY_INLINE Vec<float> load_wide(const float* at) { return hn::LoadU(Lanes<float>(), at); }
HWY_INLINE Vec<double> load_wide(const double* at) { return hn::LoadU(Lanes<double>(), at); }
HWY_INLINE Vec<float> load_wide(const uint16_t* bf16) {
  const Lanes<float> d;
  const hn::Rebind<uint16_t, Lanes<float>> d16;
  const hn::RebindToUnsigned<Lanes<float>> d32;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, bf16))));
}
HWY_INLINE void store_narrow(Vec<float> x, float* at) { hn::StoreU(x, Lanes<float>(), at); }
HWY_INLINE void store_narrow(Vec<double> x, double* at) { hn::StoreU(x, Lanes<double>(), at); }
HWY_INLINE void store_narrow(Vec<float> x, uint16_t* bf16) { store_as_bf16(x, bf16); }

template <class R>
void write_row(const R* row, DType dtype, int64_t n, std::byte* out) {
  if (dtype == DType::bf16) {
    auto* bits = reinterpret_cast<uint16_t*>(out);
    int64_t i = 0;
    if constexpr (std::is_same_v<R, float>)
      for (; i + kLanes<R> <= n; i += kLanes<R>)
        store_as_bf16(hn::LoadU(Lanes<R>(), row + i), bits + i);
    for (; i < n; ++i) bits[i] = round_to_bf16(static_cast<float>(row[i]));
  } else {
    std::memcpy(out, row, n * sizeof(R));
  }
}

// out[i] = Σ_part parts[part · size + i], for every i in [0, size).
template <class R>
void add_up(const R* parts, int64_t count, int64_t size, void* out, const ParallelFor& parallel) {
  if (!out) return;
  parallel(size, 32768, [=](int64_t begin, int64_t end) HWY_ATTR {
    R* sums = static_cast<R*>(out);
    std::copy(parts + begin, parts + end, sums + begin);
    for (int64_t part = 1; part < count; ++part)
      for (int64_t i = begin; i < end; ++i) sums[i] += parts[part * size + i];
  });
}

}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
