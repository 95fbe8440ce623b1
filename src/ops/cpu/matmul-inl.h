// Small matrix products of the CPU kernels, on tiles that lie packed in cache. Compiled once
// a Highway target.
#if defined(ASSAY_OPS_MATMUL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASSAY_OPS_MATMUL_INL_H_
#undef ASSAY_OPS_MATMUL_INL_H_
#else
#define ASSAY_OPS_MATMUL_INL_H_
#endif

#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {

// The kinds of words in a product. Each defines how the product of two words is added to a sum.
// Here a word is one number.
template <class R>
struct OfNumbers {
  using Number = R;
  static constexpr int64_t kPerWord = 1;
  static HWY_INLINE Vec<R> add(Vec<R> a, Vec<R> b, Vec<R> sum) { return hn::MulAdd(a, b, sum); }
};
// Words of two bfloat16 numbers. The second product is added first, as vdpbf16ps does.
struct OfBf16 {
  using Number = uint16_t;
  static constexpr int64_t kPerWord = 2;
  static HWY_INLINE Vec<float> add(Vec<float> a, Vec<float> b, Vec<float> sum) {
    return hn::MulAdd(lower_bf16(a), lower_bf16(b), hn::MulAdd(upper_bf16(a), upper_bf16(b), sum));
  }
};
#if HWY_TARGET <= HWY_AVX3
// As OfBf16, with AVX-512 BF16, for which this version of Highway has no function. The instruction
// takes denormal numbers for 0.
struct OfBf16Pairs : OfBf16 {
  static HWY_INLINE Vec<float> add(Vec<float> a, Vec<float> b, Vec<float> sum) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
    return sum;
  }
};
inline bool has_bf16_products() { return __builtin_cpu_supports("avx512bf16"); }
#endif

// A matrix as the left side of a product: element (m, k) lies at data[m · row + k · column].
template <class R>
struct Left {
  const R* data;
  int64_t row;
  int64_t column;
};

// The sums of a tile, with its vectors of B and one number of A, fill the vector registers: 32 with
// AVX-512, else 16.
constexpr int kProductRows = 6;
constexpr int kProductVectors = HWY_MAX_BYTES == 64 ? 4 : 2;

// C[m, n] = Σ_k A[m, k] B[k, n], or C + that; kRows × kVectors vectors of C stay in registers.
// Elements of A and B are words of the kind.
template <class Kind, int kRows, int kVectors, class R>
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
      for (int v = 0; v < kVectors; ++v) sum[m][v] = Kind::add(left, right[v], sum[m][v]);
    }
  }
  for (int m = 0; m < kRows; ++m)
    for (int v = 0; v < kVectors; ++v) store<R>(sum[m][v], c + m * c_row + v * kLanes<R>);
}

// The rows from `m` on, as many tiles of kRows as fit, then tiles of fewer rows.
template <class Kind, int kRows, int kVectors, class R>
HWY_INLINE void matmul_columns(int64_t m, int64_t rows, int64_t depth, Left<R> a, const R* b,
                               int64_t b_row, R* c, int64_t c_row, bool add) {
  for (; m + kRows <= rows; m += kRows)
    matmul_tile<Kind, kRows, kVectors>(depth, {a.data + m * a.row, a.row, a.column}, b, b_row,
                                       c + m * c_row, c_row, add);
  constexpr int kFewer = kRows > 4 ? 4 : kRows / 2;
  if constexpr (kRows > 1)
    matmul_columns<Kind, kFewer, kVectors>(m, rows, depth, a, b, b_row, c, c_row, add);
}

// The columns from `n` on in tiles of kVectors vectors, then in tiles of fewer.
template <class Kind, int kVectors, class R>
HWY_INLINE void matmul_from(int64_t n, int64_t rows, int64_t columns, int64_t depth, Left<R> a,
                            const R* b, int64_t b_row, R* c, int64_t c_row, bool add) {
  for (; n + kVectors * kLanes<R> <= columns; n += kVectors * kLanes<R>)
    matmul_columns<Kind, kProductRows, kVectors>(0, rows, depth, a, b + n, b_row, c + n, c_row,
                                                 add);
  if constexpr (kVectors > 1)
    matmul_from<Kind, kVectors / 2>(n, rows, columns, depth, a, b, b_row, c, c_row, add);
}

// C [rows, columns] = A B, or C + A B with `add`. Columns are a multiple of the lanes; rows of B
// and C begin on a vector. The order of summation depends on nothing but `depth`.
template <class R, class Kind = OfNumbers<R>>
HWY_NOINLINE void matmul(int64_t rows, int64_t columns, int64_t depth, Left<R> a, const R* b,
                         int64_t b_row, R* c, int64_t c_row, bool add) {
  matmul_from<Kind, kProductVectors>(0, rows, columns, depth, a, b, b_row, c, c_row, add);
}

}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
