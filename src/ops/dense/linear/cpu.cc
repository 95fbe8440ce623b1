// x Wᵀ for few rows on the CPU. A task takes kOutputs rows of W at a time, reads each of their
// vectors from memory once and multiplies it with kRows rows of x after the other, which lie in the
// first-level cache. Lanes are k; they are added at the end.
#include "ops/dense/linear/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/dense/linear/cpu.cc"
#include "ops/cpu/highway.h"
//
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {
using V = Vec<float>;
const Lanes<float> d;
// 12 sums, 3 vectors of x and 1 of W: 16 registers
constexpr int64_t kOutputs = 4;
constexpr int64_t kRows = 3;
constexpr int64_t kStep = 2 * kLanes<float>;
constexpr int64_t kProductsPerTask = 32768;  // fewer are not worth a thread

// Half of the kStep numbers at `at`. For bf16 these are the even and the odd ones, which takes one
// instruction each.
template <int half>
HWY_INLINE V read(const float* at) {
  return hn::LoadU(d, at + half * kLanes<float>);
}
template <int half>
HWY_INLINE V read(const uint16_t* at) {
  const hn::Repartition<uint16_t, Lanes<float>> d16;
  const V words = hn::BitCast(d, hn::LoadU(d16, at));
  return half ? upper_bf16(words) : lower_bf16(words);
}
// A row of x, with the numbers of each step in the order of read(), and zeros at the end.
template <class W>
void write_in_order(const W* x, int64_t in, float* out) {
  for (int64_t k = 0; k < in; k += kStep) {
    alignas(64) W step[kStep] = {};
    std::copy(x + k, x + std::min(k + kStep, in), step);
    store<float>(read<0>(step), out + k);
    store<float>(read<1>(step), out + k + kLanes<float>);
  }
}
int64_t padded(int64_t in) { return (in + kStep - 1) / kStep * kStep; }

template <int rows, int outputs>
struct Sums {
  V at[rows][outputs];
};
// Adds a step: x [rows] with x_row numbers in between, w [outputs] with w_row.
template <int half, int rows, int outputs, class W>
HWY_INLINE void add(const float* x, int64_t x_row, const W* w, int64_t w_row,
                    Sums<rows, outputs>& sums) {
  V left[rows];
  for (int m = 0; m < rows; ++m) left[m] = load(x + m * x_row + half * kLanes<float>);
  for (int n = 0; n < outputs; ++n) {
    const V right = read<half>(w + n * w_row);
    for (int m = 0; m < rows; ++m) sums.at[m][n] = hn::MulAdd(left[m], right, sums.at[m][n]);
  }
}

// The sums over the last numbers, which do not fill a step.
template <int rows, int outputs, class W>
HWY_NOINLINE void start(const LinearFewRows& p, const float* x, const W* w,
                        Sums<rows, outputs>& tile) {
  const int64_t x_row = padded(p.in);
  const int64_t whole = p.in / kStep * kStep;
  alignas(64) W last[outputs][kStep] = {};
  for (int i = 0; i < outputs; ++i) std::copy(w + i * p.in + whole, w + (i + 1) * p.in, last[i]);
  add<0>(x + whole, x_row, last[0], kStep, tile);
  add<1>(x + whole, x_row, last[0], kStep, tile);
}

// Outputs [n, n + outputs) of the rows [m, m + rows). No function is called between the first and
// the last step, so that the sums stay in registers.
template <int rows, int outputs, class W>
HWY_INLINE void multiply(const LinearFewRows& p, const float* x, int64_t m, int64_t n) {
  Sums<rows, outputs> tile;
  for (auto& row : tile.at)
    for (V& v : row) v = hn::Zero(d);
  const int64_t x_row = padded(p.in);
  const int64_t whole = p.in / kStep * kStep;
  x += m * x_row;
  const W* w = static_cast<const W*>(p.weight) + n * p.in;
  if (whole < p.in) start(p, x, w, tile);
  // Its share of the next outputs, so that memory and arithmetic work at the same time.
  const int64_t fetch_begin = outputs + m * outputs / p.rows;
  const int64_t fetch_end = outputs + (m + rows) * outputs / p.rows;
  for (int64_t k = 0; k < whole; k += kStep) {
    for (int64_t i = fetch_begin; i < fetch_end; ++i)
      prefetch_row<0>(reinterpret_cast<const std::byte*>(w + i * p.in + k), kStep * sizeof(W));
    add<0>(x + k, x_row, w + k, p.in, tile);
    add<1>(x + k, x_row, w + k, p.in, tile);
  }
  constexpr DType dtype = sizeof(W) == 2 ? DType::bf16 : DType::f32;
  float bias[outputs] = {};
  if (p.bias)
    read_row(element({const_cast<void*>(p.bias)}, dtype, 0, 0, n), dtype, outputs, outputs, bias);
  for (int i = 0; i < rows; ++i) {
    V of_row[kOutputs];
    for (int j = 0; j < kOutputs; ++j) of_row[j] = j < outputs ? tile.at[i][j] : hn::Zero(d);
    float out[kOutputs];
    sums(of_row, out);
    for (int j = 0; j < outputs; ++j) out[j] += bias[j];
    write_row(out, dtype, outputs, element({p.y}, dtype, 0, 0, (m + i) * p.out + n));
  }
}
template <int outputs, class W>
HWY_INLINE void multiply_rows(const LinearFewRows& p, const float* x, int64_t n) {
  int64_t m = 0;
  for (; m + kRows <= p.rows; m += kRows) multiply<kRows, outputs, W>(p, x, m, n);
  if (p.rows - m == 2) multiply<2, outputs, W>(p, x, m, n);
  if (p.rows - m == 1) multiply<1, outputs, W>(p, x, m, n);
}

template <class W>
void linear(const LinearFewRows& p, float* x, const ParallelFor& parallel) {
  for (int64_t m = 0; m < p.rows; ++m)
    write_in_order(static_cast<const W*>(p.x) + m * p.in, p.in, x + m * padded(p.in));
  parallel(p.out, kProductsPerTask / (p.rows * p.in) + 1, [&](int64_t begin, int64_t end) HWY_ATTR {
    int64_t n = begin;
    for (; n + kOutputs <= end; n += kOutputs) multiply_rows<kOutputs, W>(p, x, n);
    for (; n < end; ++n) multiply_rows<1, W>(p, x, n);
  });
}

size_t linear_bytes(const LinearFewRows& p) { return p.rows * padded(p.in) * sizeof(float); }
void linear_forward(const LinearFewRows& p, void* workspace, const ParallelFor& parallel) {
  auto* x = static_cast<float*>(workspace);
  p.dtype == DType::bf16 ? linear<uint16_t>(p, x, parallel) : linear<float>(p, x, parallel);
}

}  // namespace
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace assay::ops::cpu {
HWY_EXPORT(linear_bytes);
size_t workspace_bytes(const LinearFewRows& p) { return HWY_DYNAMIC_DISPATCH(linear_bytes)(p); }
ASSAY_CPU_WORKSPACE_KERNEL(linear_few_rows, linear_forward, LinearFewRows)
}  // namespace assay::ops::cpu
#endif
