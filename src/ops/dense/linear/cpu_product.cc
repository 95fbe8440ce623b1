// C = A B for many rows on the CPU. B is copied into panels in the order in which the tiles of the
// product read it, and A too where it is transposed; all tasks share the panels of B. A task has a
// part of the rows of C. It takes a block of them and a stretch of k at a time, and keeps their
// sums in memory of its own until the last stretch: 256 N bytes, in the L2 cache for usual layers;
// with AMX, 512 N.
//   panels of B  [stretch][N / kPanel][k][kPanel]
//            A  [block / kRows][k][kRows], for AMX [block / kRows][kRows][k]
// All arithmetic is on words of 4 bytes: one number in float32, or two of neighbouring k in
// bfloat16. "Depth" counts words.
#include "ops/dense/linear/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/dense/linear/cpu_product.cc"
#include "ops/cpu/highway.h"
//
#include <cstring>
#include <vector>

#include "ops/cpu/matmul-inl.h"
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {
using V = Vec<float>;
const Lanes<float> d;
constexpr int64_t kVectors = 2;
constexpr int64_t kPanel = kVectors * kLanes<float>;
constexpr int64_t kStretch = 384;
constexpr int64_t kProductsPerTask = 1 << 20;  // fewer are not worth a thread

#if HWY_TARGET <= HWY_AVX3
// Words of bfloat16 whose tiles are multiplied by AMX. A is transposed, and its depth whole steps.
struct OfTiles : OfBf16Tiles {
  static constexpr int64_t kRows = 2 * cpu::kTile;
  static constexpr int64_t kBlock = 4 * kRows;
  static constexpr int64_t kStep = cpu::kTile;
};
#endif
// Other words. The sums of a tile and its vectors of B fill most of the vector registers: 32 with
// AVX-512, else 16. The latency of a product needs eight sums or more.
template <class Words>
struct OfVectors : Words {
  static constexpr int64_t kRows = HWY_MAX_BYTES == 64 ? 8 : 6;
  static constexpr int64_t kBlock = 8 * kRows;
  static constexpr int64_t kStep = 1;
};

template <class Kind>
struct Product {
  using Number = typename Kind::Number;
  static constexpr int64_t kPerWord = Kind::kPerWord;
  const MatrixProduct& p;
  const Number* a;
  const Number* b;
  // length: depth of all stretches but the last
  int64_t depth;
  int64_t length;
  int64_t stretches;
  int64_t panels;
  explicit Product(const MatrixProduct& product)
      : p(product),
        a(static_cast<const Number*>(p.a)),
        b(static_cast<const Number*>(p.b)),
        depth((p.depth + kPerWord - 1) / kPerWord),
        length(length_of_stretches(depth)),
        stretches((depth + length - 1) / length),
        panels((p.columns + kPanel - 1) / kPanel) {}
  static int64_t length_of_stretches(int64_t depth) {
    const int64_t count = (depth + kStretch - 1) / kStretch;
    const int64_t length = (depth + count - 1) / count;
    return (length + Kind::kStep - 1) / Kind::kStep * Kind::kStep;
  }
  int64_t depth_of(int64_t stretch) const { return std::min(length, depth - stretch * length); }
  // Two rows of numbers whose words are one row; the second one is null past the end.
  std::pair<const Number*, const Number*> rows_of_word(const Number* matrix, int64_t stride,
                                                       int64_t word) const {
    const Number* row = matrix + word * kPerWord * stride;
    return {row, word * kPerWord + 1 < p.depth ? row + stride : nullptr};
  }
};

struct Memory {
  float* a;
  float* sums;
};
template <class Kind>
float* take_panels(const Product<Kind>& product, WorkspaceArena& carve) {
  return carve.take<float>(product.depth * product.panels * kPanel);
}
template <class Kind>
Memory take_memory(const Product<Kind>& product, WorkspaceArena& carve) {
  const int64_t panels = product.stretches > 1 ? product.panels : 1;
  return {carve.take<float>(Kind::kBlock * product.length),
          carve.take<float>(panels * Kind::kBlock * kPanel)};
}

// to[i] = the word of numbers i of the rows.
template <int64_t count>
HWY_INLINE void copy_words(std::pair<const float*, const float*> rows, float* to) {
  std::memcpy(to, rows.first, count * sizeof(float));
}
template <int64_t count>
HWY_INLINE void copy_words(std::pair<const uint16_t*, const uint16_t*> rows, float* to) {
  static constexpr uint16_t kZeros[count] = {};
  const uint16_t* first = rows.first;
  const uint16_t* second = rows.second ? rows.second : kZeros;
  uint32_t words[count];
  for (int64_t i = 0; i < count; ++i) words[i] = first[i] | uint32_t{second[i]} << 16;
  std::memcpy(to, words, sizeof(words));
}
// `size` of `count` words, and zeros.
template <int64_t count, class Number>
HWY_INLINE void copy_words(std::pair<const Number*, const Number*> rows, int64_t size, float* to) {
  if (size >= count) return copy_words<count>(rows, to);
  Number numbers[2][count] = {};
  std::copy_n(rows.first, size, numbers[0]);
  if (rows.second) std::copy_n(rows.second, size, numbers[1]);
  copy_words<count>(std::pair<const Number*, const Number*>(numbers[0], numbers[1]), to);
}

// Words [begin, end) of B, stored as [K, N], into panels.
template <class Kind>
HWY_NOINLINE void copy_rows_of_b(const Product<Kind>& product, int64_t begin, int64_t end,
                                 float* panels) {
  for (int64_t word = begin; word < end; ++word) {
    const int64_t stretch = word / product.length;
    const int64_t depth = product.depth_of(stretch);
    float* to = panels + stretch * product.length * product.panels * kPanel +
                (word - stretch * product.length) * kPanel;
    auto rows = product.rows_of_word(product.b, product.p.columns, word);
    for (int64_t n = 0; n < product.p.columns; n += kPanel, to += depth * kPanel) {
      copy_words<kPanel>(rows, product.p.columns - n, to);
      rows.first += kPanel;
      if (rows.second) rows.second += kPanel;
    }
  }
}
// Panel `panel` of all stretches of B, stored as [N, K]. The depth is whole words.
template <class Kind>
HWY_NOINLINE void copy_panel_of_b(const Product<Kind>& product, int64_t panel, float* panels) {
  const MatrixProduct& p = product.p;
  const int64_t first = panel * kPanel;
  const int64_t columns = std::min(kPanel, p.columns - first);
  for (int64_t stretch = 0; stretch < product.stretches; ++stretch) {
    const int64_t begin = stretch * product.length;
    const int64_t depth = product.depth_of(stretch);
    float* to = panels + begin * product.panels * kPanel + panel * depth * kPanel;
    if (columns < kPanel) std::fill(to, to + depth * kPanel, 0.0f);
    const typename Kind::Number* from = product.b + first * p.depth + begin * Kind::kPerWord;
    transpose_words(reinterpret_cast<const std::byte*>(from), p.depth / Kind::kPerWord, columns,
                    depth, to, kPanel);
  }
}

// Where a block of A is in memory: `count` rows of `bytes`, `stride` bytes apart.
struct Area {
  const std::byte* first = nullptr;
  int64_t stride = 0;
  int64_t count = 0;
  int64_t bytes = 0;
  // Asks for part `part` of `parts` of the rows, for the L2 cache.
  HWY_INLINE void prefetch(int64_t part, int64_t parts) const {
    for (int64_t row = part * count / parts; row < (part + 1) * count / parts; ++row)
      for (int64_t at = 0; at < bytes; at += 64)
        __builtin_prefetch(first + row * stride + at, 0, 2);
  }
};
// The area of A for rows [row, end) of C, at most a block of them, in one stretch of k.
template <class Kind>
Area area_of_a(const Product<Kind>& product, int64_t row, int64_t end, int64_t stretch) {
  const MatrixProduct& p = product.p;
  const int64_t rows = std::min(Kind::kBlock, end - row);
  const int64_t size = sizeof(typename Kind::Number);
  const int64_t k = stretch * product.length * Kind::kPerWord;
  const int64_t depth = std::min(product.depth_of(stretch) * Kind::kPerWord, p.depth - k);
  if (p.a_transposed)
    return {reinterpret_cast<const std::byte*>(product.a + k * p.rows + row), p.rows * size, depth,
            rows * size};
  return {reinterpret_cast<const std::byte*>(product.a + row * p.depth + k), p.depth * size, rows,
          depth * size};
}

// A tile of A: word (m, k) is at data + 4 (m · row + k · column) bytes.
struct LeftWords {
  const std::byte* data;
  int64_t row;
  int64_t column;
};
// Rows [row, row + rows) of a stretch of A, stored as [K, M]: tiles of words [k][kRows].
template <class Kind>
HWY_NOINLINE void copy_columns_of_a(const Product<Kind>& product, int64_t row, int64_t rows,
                                    int64_t stretch, float* copy) {
  const int64_t depth = product.depth_of(stretch);
  for (int64_t k = 0; k < depth; ++k) {
    auto pair = product.rows_of_word(product.a + row, product.p.rows, stretch * product.length + k);
    for (int64_t m = 0; m < rows; m += Kind::kRows) {
      copy_words<Kind::kRows>(pair, rows - m, copy + m * depth + k * Kind::kRows);
      pair.first += Kind::kRows;
      if (pair.second) pair.second += Kind::kRows;
    }
  }
}
#if HWY_TARGET <= HWY_AVX3
// Tiles of words [kRows][k] of these rows, for AMX.
HWY_NOINLINE void copy_columns_of_a(const Product<OfTiles>& product, int64_t row, int64_t rows,
                                    int64_t stretch, float* copy) {
  constexpr int64_t kRows = OfTiles::kRows;
  constexpr int64_t kStep = OfTiles::kStep;
  const int64_t depth = product.depth_of(stretch);
  HWY_ALIGN float words[kStep * kRows];
  for (int64_t k = 0; k < depth; k += kStep)
    for (int64_t m = 0; m < rows; m += kRows) {
      for (int64_t i = 0; i < kStep; ++i) {
        auto pair = product.rows_of_word(product.a + row + m, product.p.rows,
                                         stretch * product.length + k + i);
        copy_words<kRows>(pair, rows - m, words + i * kRows);
      }
      transpose_words(reinterpret_cast<const std::byte*>(words), kRows, kStep, kRows,
                      copy + m * depth + k, depth);
    }
}
#endif

// The tiles of a block of A, in order.
template <class Kind>
HWY_NOINLINE void tiles_of_a(const Product<Kind>& product, int64_t row, int64_t rows,
                             int64_t stretch, float* copy, std::vector<LeftWords>& tiles) {
  constexpr int64_t kRows = Kind::kRows;
  const MatrixProduct& p = product.p;
  const int64_t depth = product.depth_of(stretch);
  tiles.clear();
  for (int64_t m = 0; m < rows; m += kRows) {
    float* to = copy + m * depth;
    const int64_t count = std::min(kRows, rows - m);
    if (p.a_transposed || count < kRows) {
      const auto* at = reinterpret_cast<const std::byte*>(to);
      tiles.push_back(kUsesTiles<Kind> ? LeftWords{at, depth, 1} : LeftWords{at, 1, kRows});
      if (p.a_transposed) continue;
      std::fill(to, to + depth * kRows, 0.0f);
    }
    const auto* from = reinterpret_cast<const std::byte*>(
        product.a + (row + m) * p.depth + stretch * product.length * Kind::kPerWord);
    const int64_t stride = p.depth / Kind::kPerWord;
    if (count == kRows) tiles.push_back({from, stride, 1});
    for (int64_t i = 0; count < kRows && i < count; ++i)
      for (int64_t k = 0; k < depth; ++k)
        std::memcpy(to + k * kRows + i, from + 4 * (i * stride + k), 4);
  }
  if (p.a_transposed) copy_columns_of_a(product, row, rows, stretch, copy);
}

// sums [kRows, kPanel] = the product of a tile of A and a panel of B, or sums + that.
template <class Kind>
HWY_INLINE void multiply_tile(int64_t depth, const LeftWords& a, const float* b, float* sums,
                              bool add) {
  if constexpr (kUsesTiles<Kind>) return cpu::multiply_tiles(depth, a.data, a.row, b, sums, add);
  constexpr int64_t kRows = Kind::kRows;
  V sum[kRows][kVectors];
  for (int64_t m = 0; m < kRows; ++m)
    for (int64_t v = 0; v < kVectors; ++v)
      sum[m][v] = add ? load(sums + m * kPanel + v * kLanes<float>) : hn::Zero(d);
  for (int64_t k = 0; k < depth; ++k) {
    V right[kVectors];
    for (int64_t v = 0; v < kVectors; ++v) right[v] = load(b + k * kPanel + v * kLanes<float>);
    for (int64_t m = 0; m < kRows; ++m) {
      float word;
      std::memcpy(&word, a.data + 4 * (m * a.row + k * a.column), 4);
      const V left = hn::Set(d, word);
      for (int64_t v = 0; v < kVectors; ++v) sum[m][v] = Kind::add(left, right[v], sum[m][v]);
    }
  }
  for (int64_t m = 0; m < kRows; ++m)
    for (int64_t v = 0; v < kVectors; ++v)
      store<float>(sum[m][v], sums + m * kPanel + v * kLanes<float>);
}

// `rows` rows of C from `row` on and a panel of its columns, to or from the sums of a tile.
struct TileOfC {
  const MatrixProduct& p;
  int64_t row;
  int64_t rows;
  int64_t column;
  int64_t columns = std::min(kPanel, p.columns - column);
  std::byte* at(int64_t m) const {
    return element({p.c, 0, p.columns}, p.c_dtype, 0, row + m, column);
  }
  HWY_INLINE void prefetch() const {
    for (int64_t m = 0; m < rows; ++m)
      prefetch_row<1>(at(m), columns * (p.c_dtype == DType::bf16 ? 2 : 4));
  }
  // Reads the numbers that the product is added to: the bias, or C itself.
  HWY_INLINE void read(float* sums) const {
    for (int64_t m = 0; m < rows; ++m)
      std::memcpy(sums + m * kPanel, p.bias ? static_cast<const void*>(p.bias + column) : at(m),
                  size_t(4 * columns));
  }
  HWY_INLINE void write(const float* sums) const {
    for (int64_t m = 0; m < rows; ++m) {
      const float* from = sums + m * kPanel;
      if (columns < kPanel || p.c_dtype == DType::bf16) write_row(from, p.c_dtype, columns, at(m));
      else
        for (int64_t n = 0; n < kPanel; n += kLanes<float>)
          hn::StoreU(load(from + n), d, reinterpret_cast<float*>(at(m)) + n);
    }
  }
};

template <class Kind>
void multiply_block(const Product<Kind>& product, int64_t row, int64_t end, const float* panels,
                    const Memory& memory, std::vector<LeftWords>& tiles) {
  constexpr int64_t kRows = Kind::kRows;
  constexpr int64_t kBlock = Kind::kBlock;
  const MatrixProduct& p = product.p;
  const int64_t rows = std::min(kBlock, end - row);
  for (int64_t stretch = 0; stretch < product.stretches; ++stretch) {
    const int64_t depth = product.depth_of(stretch);
    const bool first = stretch == 0;
    const bool last = stretch + 1 == product.stretches;
    const bool reads = first && (p.add || p.bias);
    tiles_of_a(product, row, rows, stretch, memory.a, tiles);
    const Area next = !last              ? area_of_a(product, row, end, stretch + 1)
                      : row + rows < end ? area_of_a(product, row + rows, end, 0)
                                         : Area{};
    const float* b = panels + stretch * product.length * product.panels * kPanel;
    const int64_t parts = product.panels * std::ssize(tiles);
    const auto tile = [&](int64_t m, int64_t panel) {
      return TileOfC{p, row + m, std::min(kRows, rows - m), panel * kPanel};
    };
    for (int64_t panel = 0, part = 0; panel < product.panels; ++panel) {
      float* sums = memory.sums + (product.stretches > 1 ? panel * kBlock * kPanel : 0);
      for (int64_t m = 0; m < rows; m += kRows, sums += kRows * kPanel, ++part) {
        const TileOfC c = tile(m, panel);
        if (last) c.prefetch();
        if (reads) (m + kRows < rows ? tile(m + kRows, panel) : tile(0, panel + 1)).prefetch();
        next.prefetch(part, parts);
        if (reads) c.read(sums);
        multiply_tile<Kind>(depth, tiles[size_t(m / kRows)], b + panel * depth * kPanel, sums,
                            reads || !first);
        if (last) c.write(sums);
      }
    }
  }
}

template <class Kind>
size_t bytes(const MatrixProduct& p) {
  const Product<Kind> product(p);
  WorkspaceArena count;
  take_panels(product, count);
  for (int64_t task = 0; task < p.tasks; ++task) take_memory(product, count);
  return count.used();
}

template <class Kind>
void multiply(const MatrixProduct& p, void* workspace, const ParallelFor& parallel) {
  const Product<Kind> product(p);
  WorkspaceArena carve(workspace);
  float* panels = take_panels(product, carve);
  std::vector<Memory> memories;
  for (int64_t task = 0; task < p.tasks; ++task) memories.push_back(take_memory(product, carve));
  constexpr int64_t kWordsPerTask = 16384;
  if (p.b_transposed)
    parallel(product.panels, kWordsPerTask / (product.depth * kPanel) + 1,
             [&](int64_t begin, int64_t end) HWY_ATTR {
               for (int64_t panel = begin; panel < end; ++panel)
                 copy_panel_of_b(product, panel, panels);
             });
  else
    parallel(product.depth, kWordsPerTask / p.columns + 1,
             [&](int64_t begin, int64_t end)
                 HWY_ATTR { copy_rows_of_b(product, begin, end, panels); });
  const int64_t tiles = (p.rows + Kind::kRows - 1) / Kind::kRows;
  const auto begin_of = [&](int64_t task) {
    return std::min(p.rows, task * tiles / p.tasks * Kind::kRows);
  };
  const int64_t grain = kProductsPerTask * p.tasks / (p.rows * p.columns * p.depth) + 1;
  parallel(p.tasks, grain, [&](int64_t first_task, int64_t last_task) HWY_ATTR {
    [[maybe_unused]] const StateOf<Kind> state;
    std::vector<LeftWords> left;
    for (int64_t task = first_task; task < last_task; ++task)
      for (int64_t row = begin_of(task); row < begin_of(task + 1); row += Kind::kBlock)
        multiply_block(product, row, begin_of(task + 1), panels, memories[size_t(task)], left);
  });
}

// Calls f with the kind of words that this CPU multiplies fastest.
template <class F>
auto with_kind(const MatrixProduct& p, const F& f) {
  if (p.dtype != DType::bf16) return f(OfVectors<OfNumbers<float>>());
#if HWY_TARGET <= HWY_AVX3
  if (p.a_transposed && p.depth % (2 * OfTiles::kStep) == 0 && cpu::has_tiles())
    return f(OfTiles());
  if (has_bf16_products()) return f(OfVectors<OfBf16Pairs>());
#endif
  return f(OfVectors<OfBf16>());
}
size_t product_bytes(const MatrixProduct& p) {
  return with_kind(p, [&](auto kind) { return bytes<decltype(kind)>(p); });
}
void product(const MatrixProduct& p, void* workspace, const ParallelFor& parallel) {
  with_kind(p, [&](auto kind) { multiply<decltype(kind)>(p, workspace, parallel); });
}

}  // namespace
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace assay::ops::cpu {
HWY_EXPORT(product_bytes);
size_t workspace_bytes(const MatrixProduct& p) { return HWY_DYNAMIC_DISPATCH(product_bytes)(p); }
ASSAY_CPU_WORKSPACE_KERNEL(matrix_product, product, MatrixProduct)
}  // namespace assay::ops::cpu
#endif
