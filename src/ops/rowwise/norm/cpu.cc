// Norms on the CPU: a task takes blocks of rows, a part of a row at a time in a buffer.
#include "ops/rowwise/norm/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/rowwise/norm/cpu.cc"
#include "ops/cpu/highway.h"
//
#include <hwy/aligned_allocator.h>

#include <cmath>

#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {

// rows whose parts of the gradients of the parameters are summed together
constexpr int64_t kBlockRows = 64;

template <class R>
int64_t padded_width(const Norm& p) {
  return (p.width + kLanes<R> - 1) / kLanes<R> * kLanes<R>;
}
inline int64_t num_blocks(const Norm& p) { return (p.rows + kBlockRows - 1) / kBlockRows; }
inline int64_t num_kinds(const Norm& p) { return p.bias ? 2 : 1; }  // kinds of parameters

// A part of x and one of dy, and all weights and biases: each part padded with zeros, which add
// nothing to a sum.
template <class R>
struct Parts {
  const Norm& p;
  int64_t padded;
  hwy::AlignedFreeUniquePtr<R[]> memory;
  R* x;
  R* dy;
  R* weight;
  R* bias;
  explicit Parts(const Norm& norm)
      : p(norm),
        padded(padded_width<R>(p)),
        memory(hwy::AllocateAligned<R>(size_t((2 + 2 * p.groups) * padded))) {
    x = memory.get();
    dy = x + padded;
    weight = dy + padded;
    bias = weight + p.groups * padded;
    std::fill(weight, weight + 2 * p.groups * padded, R(0));
    for (int64_t g = 0; g < p.groups; ++g) {
      std::copy_n(static_cast<const R*>(p.weight) + g * p.width, p.width, weight + g * padded);
      if (p.bias)
        std::copy_n(static_cast<const R*>(p.bias) + g * p.width, p.width, bias + g * padded);
    }
  }
  std::byte* at(const void* data, int64_t part) const {
    return element({const_cast<void*>(data), 0, p.width}, p.dtype, 0, part, 0);
  }
  void read(const void* data, int64_t part, R* out) const {
    read_row(at(data, part), p.dtype, p.width, padded, out);
  }
  void write(const R* in, void* data, int64_t part) const {
    write_row(in, p.dtype, p.width, at(data, part));
  }
  template <class Term>
  R mean(Term term) const {
    Vec<R> total = hn::Zero(Lanes<R>());
    for (int64_t i = 0; i < padded; i += kLanes<R>) total = hn::Add(total, term(i));
    return sum<R>(total) / R(p.width);
  }
  // x ← x − mean, and the padding stays 0.
  void centre(R mean) {
    const Vec<R> m = hn::Set(Lanes<R>(), mean);
    fill<R>(x, padded, [&](int64_t i) HWY_ATTR { return hn::Sub(load(x + i), m); });
    std::fill(x + p.width, x + padded, R(0));
  }
};

template <class R>
void forward_part(const Norm& p, int64_t part, Parts<R>& r) {
  r.read(p.x, part, r.x);
  if (p.bias) {
    const R mean = r.mean([&](int64_t i) HWY_ATTR { return load(r.x + i); });
    static_cast<R*>(p.mean)[part] = mean;
    r.centre(mean);
  }
  const R squares =
      r.mean([&](int64_t i) HWY_ATTR { return hn::Mul(load(r.x + i), load(r.x + i)); });
  const R scale = R(1) / std::sqrt(squares + R(p.eps));
  static_cast<R*>(p.scale)[part] = scale;
  const R* weight = r.weight + part % p.groups * r.padded;
  const R* bias = r.bias + part % p.groups * r.padded;
  const Vec<R> s = hn::Set(Lanes<R>(), scale);
  fill<R>(r.x, r.padded, [&](int64_t i) HWY_ATTR {
    return hn::MulAdd(hn::Mul(load(r.x + i), s), load(weight + i), load(bias + i));
  });
  r.write(r.x, p.y, part);
}

// dparameters: of the block, weights and then biases, [kinds, groups, padded].
template <class R>
void backward_part(const NormBackward& bwd, int64_t part, Parts<R>& r, R* dparameters) {
  const Norm& p = bwd.forward;
  const int64_t group = part % p.groups * r.padded;
  const R* weight = r.weight + group;
  R* dweight = dparameters + group;
  R* dbias = dweight + p.groups * r.padded;
  r.read(p.x, part, r.x);
  r.read(bwd.dy, part, r.dy);
  if (p.bias) {
    r.centre(static_cast<const R*>(p.mean)[part]);
    fill<R>(dbias, r.padded,
            [&](int64_t i) HWY_ATTR { return hn::Add(load(dbias + i), load(r.dy + i)); });
  }
  const R scale = static_cast<const R*>(p.scale)[part];
  const auto g = [&](int64_t i) HWY_ATTR { return hn::Mul(load(weight + i), load(r.dy + i)); };
  const R inner = r.mean([&](int64_t i) HWY_ATTR { return hn::Mul(load(r.x + i), g(i)); });
  const Vec<R> s = hn::Set(Lanes<R>(), scale);
  const Vec<R> back = hn::Set(Lanes<R>(), scale * scale * scale * inner);
  const Vec<R> level = hn::Set(Lanes<R>(), p.bias ? scale * r.mean(g) : R(0));
  for (int64_t i = 0; i < r.padded; i += kLanes<R>) {
    const Vec<R> x = load(r.x + i);
    store<R>(hn::MulAdd(hn::Mul(s, x), load(r.dy + i), load(dweight + i)), dweight + i);
    store<R>(hn::NegMulAdd(x, back, hn::Sub(hn::Mul(s, g(i)), level)), r.x + i);
  }
  r.write(r.x, bwd.dx, part);
}

template <class R>
void forward(const Norm& p, const ParallelFor& parallel) {
  parallel(p.rows * p.groups, std::max<int64_t>(1, 16384 / p.width),
           [&](int64_t begin, int64_t end) HWY_ATTR {
             Parts<R> r(p);
             for (int64_t part = begin; part < end; ++part) forward_part(p, part, r);
           });
}

template <class R>
R* sums_of(const NormBackward& bwd, void* workspace, size_t* bytes = nullptr) {
  const Norm& p = bwd.forward;
  WorkspaceArena carver(workspace);
  R* sums = carver.take<R>(num_blocks(p) * num_kinds(p) * p.groups * padded_width<R>(p));
  if (bytes) *bytes = carver.used();
  return sums;
}

template <class R>
void backward(const NormBackward& bwd, void* workspace, const ParallelFor& parallel) {
  const Norm& p = bwd.forward;
  const int64_t padded = padded_width<R>(p);
  const int64_t size = num_kinds(p) * p.groups * padded;
  R* sums = sums_of<R>(bwd, workspace);
  parallel(num_blocks(p), 1, [&](int64_t begin, int64_t end) HWY_ATTR {
    Parts<R> r(p);
    for (int64_t block = begin; block < end; ++block) {
      R* mine = sums + block * size;
      std::fill(mine, mine + size, R(0));
      const int64_t last = std::min(p.rows, (block + 1) * kBlockRows) * p.groups;
      for (int64_t part = block * kBlockRows * p.groups; part < last; ++part)
        backward_part(bwd, part, r, mine);
    }
  });
  for (int64_t block = 1; block < num_blocks(p); ++block)
    for (int64_t i = 0; i < size; ++i) sums[i] += sums[block * size + i];
  for (int64_t i = 0; i < num_kinds(p) * p.groups; ++i)
    std::copy_n(sums + i * padded, p.width, static_cast<R*>(bwd.dparameters) + i * p.width);
}

size_t norm_bytes(const NormBackward& bwd) {
  size_t bytes = 0;
  bwd.forward.dtype == DType::f64 ? (void)sums_of<double>(bwd, nullptr, &bytes)
                                  : (void)sums_of<float>(bwd, nullptr, &bytes);
  return bytes;
}
void norm_forward(const Norm& p, const ParallelFor& parallel) {
  p.dtype == DType::f64 ? forward<double>(p, parallel) : forward<float>(p, parallel);
}
void norm_backward(const NormBackward& bwd, void* workspace, const ParallelFor& parallel) {
  bwd.forward.dtype == DType::f64 ? backward<double>(bwd, workspace, parallel)
                                  : backward<float>(bwd, workspace, parallel);
}

}  // namespace
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace assay::ops::cpu {
HWY_EXPORT(norm_bytes);
size_t workspace_bytes(const NormBackward& bwd) { return HWY_DYNAMIC_DISPATCH(norm_bytes)(bwd); }
ASSAY_CPU_KERNEL(norm, norm_forward, Norm)
ASSAY_CPU_WORKSPACE_KERNEL(norm, norm_backward, NormBackward)
}  // namespace assay::ops::cpu
#endif
