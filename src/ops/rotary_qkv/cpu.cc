// Rotary queries, keys and values on the CPU: a task takes positions, a head at a time.
#include "ops/rotary_qkv/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/rotary_qkv/cpu.cc"
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>
//
#include <vector>

#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {

struct Head {
  std::byte *packed, *alone;  // in qkv; in q, k or v
  bool turned;
};
inline Head head_at(const RotaryQkv& p, int64_t position, int64_t head) {
  const int64_t all = p.heads + 2 * p.kv_heads, D = p.head_dim;
  std::byte* packed = element({p.qkv, 0, all * D}, p.dtype, 0, position, head * D);
  const auto alone = [&](void* data, int64_t heads, int64_t h) { return element({data, 0, heads * D}, p.dtype, 0, position, h * D); };
  if (head < p.heads) return {packed, alone(p.q, p.heads, head), true};
  if (head < p.heads + p.kv_heads) return {packed, alone(p.k, p.kv_heads, head - p.heads), true};
  return {packed, alone(p.v, p.kv_heads, head - p.heads - p.kv_heads), false};
}

// The halves of a head, each padded to whole vectors, and the angles of its position.
template <class R>
struct Scratch {
  int64_t half, padded;
  std::vector<R> numbers;
  R *first, *second, *cos, *sin;
  explicit Scratch(int64_t half) : half(half), padded((half + kLanes<R> - 1) / kLanes<R> * kLanes<R>), numbers(4 * padded + kLanes<R>) {
    const auto address = reinterpret_cast<uintptr_t>(numbers.data());
    first = numbers.data() + (-address % (kLanes<R> * sizeof(R))) / sizeof(R);
    second = first + padded, cos = second + padded, sin = cos + padded;
  }
};

template <class R>
void turn(const RotaryQkv& p, const Head& head, Scratch<R>& s) {
  std::byte *from = p.backward ? head.alone : head.packed, *to = p.backward ? head.packed : head.alone;
  const int64_t bytes = s.half * (p.dtype == DType::bf16 ? 2 : int64_t{sizeof(R)});
  if (!head.turned) return void(std::memcpy(to, from, size_t(2 * bytes)));
  read_row(from, p.dtype, s.half, s.padded, s.first), read_row(from + bytes, p.dtype, s.half, s.padded, s.second);
  for (int64_t i = 0; i < s.padded; i += kLanes<R>) {
    const Vec<R> a = load(s.first + i), b = load(s.second + i), cos = load(s.cos + i), sin = load(s.sin + i);
    store<R>(hn::NegMulAdd(b, sin, hn::Mul(a, cos)), s.first + i);
    store<R>(hn::MulAdd(a, sin, hn::Mul(b, cos)), s.second + i);
  }
  write_row(s.first, p.dtype, s.half, to), write_row(s.second, p.dtype, s.half, to + bytes);
}

template <class R>
void read_angles(const RotaryQkv& p, int64_t t, Scratch<R>& s) {
  const R *cos = static_cast<const R*>(p.cos) + t * s.half, *sin = static_cast<const R*>(p.sin) + t * s.half;
  const R sign = p.backward ? R(-1) : R(1);
  for (int64_t i = 0; i < s.half; ++i) s.cos[i] = cos[i], s.sin[i] = sign * sin[i];
}

template <class R>
void over_positions(const RotaryQkv& p, const ParallelFor& parallel) {
  const int64_t heads = p.heads + 2 * p.kv_heads;
  parallel(p.batch * p.time, std::max<int64_t>(1, 16384 / (heads * p.head_dim)), [&](int64_t begin, int64_t end) HWY_ATTR {
    Scratch<R> s(p.head_dim / 2);
    for (int64_t position = begin; position < end; ++position) {
      read_angles(p, position % p.time, s);
      for (int64_t head = 0; head < heads; ++head) turn(p, head_at(p, position, head), s);
    }
  });
}

void turn_all(const RotaryQkv& p, const ParallelFor& parallel) {
  p.dtype == DType::f64 ? over_positions<double>(p, parallel) : over_positions<float>(p, parallel);
}

}  // namespace
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace assay::ops::cpu {
HWY_EXPORT(turn_all);
void rotary_qkv(const RotaryQkv& p, const ParallelFor& parallel) { HWY_DYNAMIC_DISPATCH(turn_all)(p, parallel); }
}  // namespace assay::ops::cpu
#endif
