// Small matrix products of the CPU kernels, on tiles that lie packed in cache. Compiled once
// a Highway target.
#if defined(ASSAY_OPS_MATMUL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASSAY_OPS_MATMUL_INL_H_
#undef ASSAY_OPS_MATMUL_INL_H_
#else
#define ASSAY_OPS_MATMUL_INL_H_
#endif

#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {

// A matrix as the left side of a product: element (m, k) lies at data[m · row + k · column].
template <class R>
struct Left {
  const R* data;
  int64_t row, column;
};

// C[m, n] = Σ_k A[m, k] B[k, n], or C + that; kRows × kVectors vectors of C stay in registers.
template <int kRows, int kVectors, class R>
HWY_INLINE void matmul_tile(int64_t depth, Left<R> a, const R* b, int64_t b_row, R* c,
                            int64_t c_row, bool add) {
  Vec<R> sum[kRows][kVectors];
  for (int m = 0; m < kRows; ++m)
    for (int v = 0; v < kVectors; ++v)
      sum[m][v] = add ? load(c + m * c_row + v * kLanes<R>) : hn::Zero(Lanes<R>());
  for (int64_t k = 0; k < depth; ++k) {
    Vec<R> right[kVectors];
    for (int v = 0; v < kVectors; ++v) right[v] = load(b + k * b_row + v * kLanes<R>);
    for (int m = 0; m < kRows; ++m) {
      const Vec<R> left = hn::Set(Lanes<R>(), a.data[m * a.row + k * a.column]);
      for (int v = 0; v < kVectors; ++v) sum[m][v] = hn::MulAdd(left, right[v], sum[m][v]);
    }
  }
  for (int m = 0; m < kRows; ++m)
    for (int v = 0; v < kVectors; ++v) store<R>(sum[m][v], c + m * c_row + v * kLanes<R>);
}

template <int kVectors, class R>
HWY_INLINE void matmul_columns(int64_t rows, int64_t depth, Left<R> a, const R* b, int64_t b_row,
                               R* c, int64_t c_row, bool add) {
  constexpr int kRows = 4;
  int64_t m = 0;
  for (; m + kRows <= rows; m += kRows)
    matmul_tile<kRows, kVectors>(depth, {a.data + m * a.row, a.row, a.column}, b, b_row,
                                 c + m * c_row, c_row, add);
  for (; m < rows; ++m)
    matmul_tile<1, kVectors>(depth, {a.data + m * a.row, a.row, a.column}, b, b_row, c + m * c_row,
                             c_row, add);
}

// C [rows, columns] = A B, or C + A B with `add`. Columns are a multiple of the lanes; rows of B
// and C begin on a vector. The order of summation depends on nothing but `depth`.
template <class R>
HWY_NOINLINE void matmul(int64_t rows, int64_t columns, int64_t depth, Left<R> a, const R* b,
                         int64_t b_row, R* c, int64_t c_row, bool add) {
  int64_t n = 0;
  for (; n + 2 * kLanes<R> <= columns; n += 2 * kLanes<R>)
    matmul_columns<2>(rows, depth, a, b + n, b_row, c + n, c_row, add);
  for (; n < columns; n += kLanes<R>)
    matmul_columns<1>(rows, depth, a, b + n, b_row, c + n, c_row, add);
}

}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
