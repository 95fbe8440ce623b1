// Small matrix products of the CPU kernels, on tiles that lie packed in cache. Compiled once
// a Highway target.
#if defined(ASSAY_OPS_MATMUL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASSAY_OPS_MATMUL_INL_H_
#undef ASSAY_OPS_MATMUL_INL_H_
#else
#define ASSAY_OPS_MATMUL_INL_H_
#endif

#include <type_traits>
#include <variant>

#include "ops/cpu/cpu_tiles.h"
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
// As OfBf16Pairs, but AMX multiplies whole tiles.
struct OfBf16Tiles : OfBf16Pairs {};
template <class Kind>
inline constexpr bool kUsesTiles = std::is_base_of_v<OfBf16Tiles, Kind>;
#else
template <class Kind>
inline constexpr bool kUsesTiles = false;
#endif
// The state that a thread has while it multiplies words of a kind.
template <class Kind>
using StateOf = std::conditional_t<kUsesTiles<Kind>, cpu::Tiles, std::monostate>;

// to [columns, rows], in rows `to_row` apart, = the transpose of words [rows, columns] that are
// `stride` apart.
HWY_INLINE void transpose_words(const std::byte* from, int64_t stride, int64_t rows,
                                int64_t columns, float* to, int64_t to_row) {
  const hn::FixedTag<float, 4> four;
  const hn::FixedTag<double, 2> two;
  const auto pairs = [&](auto a, auto b, auto c, auto e, float* at) HWY_ATTR {
    const auto ab = hn::BitCast(two, hn::InterleaveLower(four, a, b));
    const auto ce = hn::BitCast(two, hn::InterleaveLower(four, c, e));
    hn::StoreU(hn::BitCast(four, hn::InterleaveLower(two, ab, ce)), four, at);
    hn::StoreU(hn::BitCast(four, hn::InterleaveUpper(two, ab, ce)), four, at + to_row);
  };
  const auto read = [&](int64_t row, int64_t column) HWY_ATTR {
    const auto* at = from + 4 * (row * stride + column);
    return hn::BitCast(four, hn::LoadU(hn::Repartition<uint8_t, decltype(four)>(),
                                       reinterpret_cast<const uint8_t*>(at)));
  };
  const int64_t whole_rows = rows / 4 * 4;
  const int64_t whole_columns = columns / 4 * 4;
  for (int64_t k = 0; k < whole_columns; k += 4)
    for (int64_t n = 0; n < whole_rows; n += 4) {
      const auto a = read(n, k);
      const auto b = read(n + 1, k);
      const auto c = read(n + 2, k);
      const auto e = read(n + 3, k);
      pairs(a, b, c, e, to + k * to_row + n);
      const auto high = [&](auto v) HWY_ATTR { return hn::ConcatUpperUpper(four, v, v); };
      pairs(high(a), high(b), high(c), high(e), to + (k + 2) * to_row + n);
    }
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t k = n < whole_rows ? whole_columns : 0; k < columns; ++k)
      std::memcpy(to + k * to_row + n, from + 4 * (n * stride + k), 4);
}

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
// and C begin on a vector. The order of summation depends on `depth`, and with AMX on whether a row
// is in a whole tile.
template <class R, class Kind = OfNumbers<R>>
HWY_NOINLINE void matmul(int64_t rows, int64_t columns, int64_t depth, Left<R> a, const R* b,
                         int64_t b_row, R* c, int64_t c_row, bool add) {
  matmul_from<Kind, kProductVectors>(0, rows, columns, depth, a, b, b_row, c, c_row, add);
}
#if HWY_TARGET <= HWY_AVX3
// matmul for whole tiles of rows and of depth.
inline void matmul_of_tiles(int64_t rows, int64_t columns, int64_t depth, Left<float> a,
                            const float* b, int64_t b_row, float* c, int64_t c_row, bool add) {
  constexpr int64_t kColumns = 4 * cpu::kTile;
  constexpr int64_t kDepth = 64;  // words of a row that are transposed at a time
  HWY_ALIGN float copy[cpu::kTile * kDepth];
  for (int64_t m = 0; m < rows; m += cpu::kTile)
    for (int64_t k = 0; k < depth; k += kDepth) {
      const int64_t words = std::min(kDepth, depth - k);
      const float* left = a.data + m * a.row + k * a.column;
      const bool in_rows = a.column == 1;
      if (!in_rows)
        transpose_words(reinterpret_cast<const std::byte*>(left), a.column, words, cpu::kTile, copy,
                        kDepth);
      for (int64_t n = 0; n < columns; n += kColumns)
        cpu::multiply_row_of_tiles(std::min(kColumns, columns - n), words, in_rows ? left : copy,
                                   in_rows ? a.row : kDepth, b + k * b_row + n, b_row,
                                   c + m * c_row + n, c_row, add || k > 0);
    }
}
template <>
inline HWY_NOINLINE void matmul<float, OfBf16Tiles>(int64_t rows, int64_t columns, int64_t depth,
                                                    Left<float> a, const float* b, int64_t b_row,
                                                    float* c, int64_t c_row, bool add) {
  const int64_t whole_rows = rows / cpu::kTile * cpu::kTile;
  const int64_t whole_depth = depth / cpu::kTile * cpu::kTile;
  matmul_of_tiles(whole_rows, columns, whole_depth, a, b, b_row, c, c_row, add);
  if (whole_depth < depth)
    matmul<float, OfBf16Pairs>(whole_rows, columns, depth - whole_depth,
                               {a.data + whole_depth * a.column, a.row, a.column},
                               b + whole_depth * b_row, b_row, c, c_row, add || whole_depth > 0);
  matmul<float, OfBf16Pairs>(rows - whole_rows, columns, depth,
                             {a.data + whole_rows * a.row, a.row, a.column}, b, b_row,
                             c + whole_rows * c_row, c_row, add);
}
#endif

}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
