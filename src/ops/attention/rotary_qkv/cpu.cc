// Rotary queries and keys on the CPU: a task takes positions, a head at a time.
#include "ops/attention/rotary_qkv/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/attention/rotary_qkv/cpu.cc"
#include "ops/cpu/highway.h"
//
#include <cmath>
#include <vector>

#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {

struct Head {
  // in qk; in q or k
  std::byte* packed;
  std::byte* alone;
  std::byte* normed;  // with QK-norm: in the qk of the forward
  int64_t query;      // its number among the queries' heads; −1 for a key's
};
inline Head head_at(const RotaryQk& p, int64_t b, int64_t t, int64_t head) {
  const auto in = [&](const View& view, int64_t h) {
    return element(view, p.dtype, b, t, h * p.head_dim);
  };
  std::byte* normed = p.scale ? in(p.backward ? p.normed : p.qk, head) : nullptr;
  if (head < p.heads) return {in(p.qk, head), in(p.q, head), normed, head};
  return {in(p.qk, head), in(p.k, head - p.heads), normed, -1};
}

// The halves of a head, of what it was before QK-norm, and the angles of its position, each padded
// to whole vectors.
template <class R>
struct Scratch {
  int64_t half;
  int64_t padded;
  std::vector<R> numbers;
  R* first;
  R* second;
  R* normed_first;
  R* normed_second;
  R* cos;
  R* sin;
  explicit Scratch(int64_t half)
      : half(half),
        padded((half + kLanes<R> - 1) / kLanes<R> * kLanes<R>),
        numbers(6 * padded + kLanes<R>) {
    const auto address = reinterpret_cast<uintptr_t>(numbers.data());
    first = numbers.data() + (-address % (kLanes<R> * sizeof(R))) / sizeof(R);
    second = first + padded;
    normed_first = second + padded;
    normed_second = normed_first + padded;
    cos = normed_second + padded;
    sin = cos + padded;
  }
};

// Σ (a b + c d) over the halves.
template <class R>
R product(const Scratch<R>& s, const R* a, const R* b, const R* c, const R* d) {
  Vec<R> total = set<R>(0);
  for (int64_t i = 0; i < s.padded; i += kLanes<R>)
    total = hn::MulAdd(load(a + i), load(b + i), hn::MulAdd(load(c + i), load(d + i), total));
  return sum<R>(total);
}

// With x the head, g its gradient turned back, n = √(Σ x² + ε) and s the scale: x ← s x / n, or dx
// = s/n (g − x (x·g)/n²) and ds = (x·g)/n.
template <class R>
void norm(const RotaryQk& p, const Head& head, int64_t position, Scratch<R>& s) {
  const bool query = head.query >= 0;
  const R* x = s.normed_first;
  const R* y = s.normed_second;
  const R inverse = 1 / std::sqrt(product(s, x, x, y, y) + R(kUnitLengthEps));
  const R scale = inverse * (query ? static_cast<const R*>(p.scale)[head.query] : R(1));
  R along = 0;
  if (p.backward) {
    const R slope = product<R>(s, x, s.first, y, s.second) * inverse;
    along = slope * inverse;
    if (query) static_cast<R*>(p.dscale)[position * p.heads + head.query] = slope;
  }
  for (int64_t i = 0; i < s.padded; i += kLanes<R>) {
    store<R>(hn::Mul(set<R>(scale), hn::NegMulAdd(set<R>(along), load(x + i), load(s.first + i))),
             s.first + i);
    store<R>(hn::Mul(set<R>(scale), hn::NegMulAdd(set<R>(along), load(y + i), load(s.second + i))),
             s.second + i);
  }
}

template <class R>
void turn(const RotaryQk& p, const Head& head, int64_t position, Scratch<R>& s) {
  std::byte* from = p.backward ? head.alone : head.packed;
  std::byte* to = p.backward ? head.packed : head.alone;
  const int64_t bytes = s.half * (p.dtype == DType::bf16 ? 2 : int64_t{sizeof(R)});
  read_row(from, p.dtype, s.half, s.padded, s.first);
  read_row(from + bytes, p.dtype, s.half, s.padded, s.second);
  for (int64_t i = 0; i < s.padded; i += kLanes<R>) {
    const Vec<R> a = load(s.first + i);
    const Vec<R> b = load(s.second + i);
    const Vec<R> cos = load(s.cos + i);
    const Vec<R> sin = load(s.sin + i);
    store<R>(hn::NegMulAdd(b, sin, hn::Mul(a, cos)), s.first + i);
    store<R>(hn::MulAdd(a, sin, hn::Mul(b, cos)), s.second + i);
  }
  if (head.normed) {
    read_row(head.normed, p.dtype, s.half, s.padded, s.normed_first);
    read_row(head.normed + bytes, p.dtype, s.half, s.padded, s.normed_second);
    norm(p, head, position, s);
  }
  write_row(s.first, p.dtype, s.half, to);
  write_row(s.second, p.dtype, s.half, to + bytes);
}

template <class R>
void read_angles(const RotaryQk& p, int64_t t, Scratch<R>& s) {
  const R* cos = static_cast<const R*>(p.cos) + t * s.half;
  const R* sin = static_cast<const R*>(p.sin) + t * s.half;
  const R sign = p.backward ? R(-1) : R(1);
  for (int64_t i = 0; i < s.half; ++i) {
    s.cos[i] = cos[i];
    s.sin[i] = sign * sin[i];
  }
}

template <class R>
void over_positions(const RotaryQk& p, const ParallelFor& parallel) {
  const int64_t heads = p.heads + p.kv_heads;
  parallel(p.batch * p.time, std::max<int64_t>(1, 16384 / (heads * p.head_dim)),
           [&](int64_t begin, int64_t end) HWY_ATTR {
             Scratch<R> s(p.head_dim / 2);
             for (int64_t position = begin; position < end; ++position) {
               const int64_t b = position / p.time;
               const int64_t t = position % p.time;
               read_angles(p, t, s);
               for (int64_t head = 0; head < heads; ++head)
                 turn(p, head_at(p, b, t, head), position, s);
             }
           });
}

void turn_all(const RotaryQk& p, const ParallelFor& parallel) {
  p.dtype == DType::f64 ? over_positions<double>(p, parallel) : over_positions<float>(p, parallel);
}

}  // namespace
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace assay::ops::cpu {
ASSAY_CPU_KERNEL(rotary_qk, turn_all, RotaryQk)
}  // namespace assay::ops::cpu
#endif
