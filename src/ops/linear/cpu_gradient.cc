// The gradient of a weight on the CPU. A task has a part of the rows of dW and takes a stretch of
// the rows of dy and x at a time, which it copies into panels in the order in which the tiles of
// the product read them:
//   of dy  [out / kProductRows][stretch][kProductRows]      of x  [in / kPanel][stretch][kPanel]
#include "ops/linear/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/linear/cpu_gradient.cc"
#include "ops/highway.h"
//
#include <vector>

#include "ops/matmul-inl.h"
#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {
constexpr int64_t kPanel = kProductVectors * kLanes<float>;
// The panels of a stretch lie in the L2 cache: those of x at the same time, of dy a few.
constexpr int64_t kStretch = 384, kColumns = 384, kOutputs = 48;
static_assert(kColumns % kPanel == 0 && kOutputs % kProductRows == 0);
constexpr int64_t kProductsPerTask = 1 << 20;  // fewer are not worth a thread

struct Panels {
  float *dy, *x;
};
Panels take_panels(WorkspaceArena& carve) {
  return {carve.take<float>(kStretch * kOutputs), carve.take<float>(kStretch * kColumns)};
}

// Numbers [0, size) of each of the rows, `stride` apart, into panels of `width` numbers; the last
// one is zero-padded.
template <int64_t width>
HWY_NOINLINE void copy_to_panels(const float* from, int64_t stride, int64_t rows, int64_t size,
                                 float* panels) {
  const int64_t whole = size / width * width;
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = from + r * stride;
    float* to = panels + r * width;
    for (int64_t i = 0; i < whole; i += width) std::copy_n(row + i, width, to + i * rows);
    if (whole == size) continue;
    float* last = to + whole * rows;
    std::fill(std::copy(row + whole, row + size, last), last + width, 0.0f);
  }
}

// A tile of dW with `rows` × `columns` numbers, or that of a part of it.
void multiply(int64_t depth, const float* dy, const float* x, int64_t rows, int64_t columns,
              float* dweight, int64_t stride, bool add) {
  const Left<float> left{dy, 1, kProductRows};
  const bool aligned = reinterpret_cast<uintptr_t>(dweight) % (4 * kLanes<float>) == 0 &&
                       stride % kLanes<float> == 0;
  if (rows == kProductRows && columns == kPanel && aligned)
    return matmul_tile<kProductRows, kProductVectors>(depth, left, x, kPanel, dweight, stride, add);
  HWY_ALIGN float tile[kProductRows * kPanel] = {};
  for (int64_t i = 0; add && i < rows; ++i)
    std::copy_n(dweight + i * stride, columns, tile + i * kPanel);
  matmul_tile<kProductRows, kProductVectors>(depth, left, x, kPanel, tile, kPanel, add);
  for (int64_t i = 0; i < rows; ++i) std::copy_n(tile + i * kPanel, columns, dweight + i * stride);
}

// Adds the stretch of rows from `first` on to outputs [begin, end) and inputs [column, column +
// columns).
void add_stretch(const LinearWeightGradient& p, int64_t first, int64_t begin, int64_t end,
                 int64_t column, const Panels& panels) {
  const int64_t depth = std::min(kStretch, p.rows - first),
                columns = std::min(kColumns, p.in - column);
  copy_to_panels<kPanel>(p.x + first * p.in + column, p.in, depth, columns, panels.x);
  for (int64_t out = begin; out < end; out += kOutputs) {
    const int64_t outputs = std::min(kOutputs, end - out);
    copy_to_panels<kProductRows>(p.dy + first * p.out + out, p.out, depth, outputs, panels.dy);
    for (int64_t n = 0; n < columns; n += kPanel)
      for (int64_t m = 0; m < outputs; m += kProductRows)
        multiply(depth, panels.dy + m * depth, panels.x + n * depth,
                 std::min<int64_t>(kProductRows, outputs - m), std::min(kPanel, columns - n),
                 p.dweight + (out + m) * p.in + column + n, p.in, p.add || first > 0);
  }
}

size_t gradient_bytes(const LinearWeightGradient& p) {
  WorkspaceArena count;
  for (int64_t task = 0; task < p.tasks; ++task) take_panels(count);
  return count.used();
}

void gradient(const LinearWeightGradient& p, void* workspace, const ParallelFor& parallel) {
  WorkspaceArena carve(workspace);
  std::vector<Panels> panels;
  for (int64_t task = 0; task < p.tasks; ++task) panels.push_back(take_panels(carve));
  const int64_t tiles = (p.out + kProductRows - 1) / kProductRows;
  const auto begin_of = [&](int64_t task) {
    return std::min(p.out, task * tiles / p.tasks * kProductRows);
  };
  const int64_t grain = kProductsPerTask * p.tasks / (p.rows * p.in * p.out) + 1;
  parallel(p.tasks, grain, [&](int64_t first_task, int64_t last_task) HWY_ATTR {
    for (int64_t task = first_task; task < last_task; ++task)
      for (int64_t column = 0; column < p.in; column += kColumns)
        for (int64_t first = 0; first < p.rows; first += kStretch)
          add_stretch(p, first, begin_of(task), begin_of(task + 1), column, panels[size_t(task)]);
  });
}

}  // namespace
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace assay::ops::cpu {
HWY_EXPORT(gradient_bytes);
size_t workspace_bytes(const LinearWeightGradient& p) {
  return HWY_DYNAMIC_DISPATCH(gradient_bytes)(p);
}
ASSAY_CPU_WORKSPACE_KERNEL(linear_weight_gradient, gradient, LinearWeightGradient)
}  // namespace assay::ops::cpu
#endif
