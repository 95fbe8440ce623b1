// Window attention on the CPU: a block of queries, the scratch of a task, and how rows get from the
// arguments to it and back. Compiled once for each Highway target.
#if defined(ASSAY_OPS_WINDOW_ATTENTION_CPU_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASSAY_OPS_WINDOW_ATTENTION_CPU_INL_H_
#undef ASSAY_OPS_WINDOW_ATTENTION_CPU_INL_H_
#else
#define ASSAY_OPS_WINDOW_ATTENTION_CPU_INL_H_
#endif

#include <vector>

#include "ops/attention/window_attention/kernel.h"
#include "ops/cpu/matmul-inl.h"
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {                     // other operators have tiles and scratch of their own
constexpr int64_t kBlock = 64;  // queries of a block, and keys of a tile

template <class R>
int64_t padded(int64_t n) {
  return (n + kLanes<R> - 1) / kLanes<R> * kLanes<R>;
}

// Queries [first, first + rows) of head h; positions [position, position + rows); keys [key_begin,
// key_end) are seen.
struct Block {
  int64_t batch;
  int64_t head;
  int64_t kv_head;
  int64_t first;
  int64_t rows;
  int64_t position;
  int64_t key_begin;
  int64_t key_end;
};
Block block_at(const WindowAttentionForward& p, int64_t batch, int64_t head, int64_t index) {
  const int64_t first = index * kBlock;
  const int64_t rows = std::min(kBlock, p.time - first);
  const int64_t position = first + p.keys - p.time;
  return {batch,
          head,
          head / (p.heads / p.kv_heads),
          first,
          rows,
          position,
          std::max<int64_t>(0, position - p.window + 1),
          position + rows};
}
int64_t num_blocks(const WindowAttentionForward& p) { return (p.time + kBlock - 1) / kBlock; }

// Rows of kBlock or of padded(head_dim) numbers, which `dim` holds.
template <class R>
struct Scratch {
  int64_t dim;
  // [D, kBlock]
  R* q_columns;
  R* dout_columns;
  // [kBlock, dim]; `out` collects O forward
  R* q;
  R* dout;
  R* out;
  R* dq;
  // [kBlock, dim]
  R* k;
  R* v;
  R* product;
  // [kBlock keys, kBlock queries]: scores, then weights; their gradients
  R* p;
  R* ds;
  // Words of two numbers in bfloat16: of neighbouring queries, [kBlock keys, kBlock / 2]; of
  // neighbouring keys, [kBlock / 2, kBlock queries].
  R* p_of_queries;
  R* ds_of_queries;
  R* of_keys;
  // [kBlock]
  R* max;
  R* sum;
  R* rescale;
  R* log_decays;
  R* row;  // [dim]
};
template <class R>
Scratch<R> take_scratch(const WindowAttentionForward& p, bool backward, WorkspaceArena& carve) {
  Scratch<R> s{};
  s.dim = padded<R>(p.head_dim);
  for (R** columns : {&s.q_columns, &s.dout_columns}) *columns = carve.take<R>(p.head_dim * kBlock);
  for (R** rows : {&s.out, &s.k, &s.v}) *rows = carve.take<R>(kBlock * s.dim);
  for (R** rows : {&s.q, &s.dout, &s.dq, &s.product})
    if (backward) *rows = carve.take<R>(kBlock * s.dim);
  for (R** scores : {&s.p, &s.ds}) *scores = carve.take<R>(kBlock * kBlock);
  for (R** words : {&s.p_of_queries, &s.ds_of_queries, &s.of_keys})
    if (p.dtype == DType::bf16) *words = carve.take<R>(kBlock * kBlock / 2);
  for (R** row : {&s.max, &s.sum, &s.rescale, &s.log_decays}) *row = carve.take<R>(kBlock);
  s.row = carve.take<R>(s.dim);
  return s;
}
template <class R>
std::vector<Scratch<R>> take_scratches(const WindowAttentionForward& p, bool backward,
                                       int64_t slots, WorkspaceArena& carve) {
  std::vector<Scratch<R>> out;
  for (int64_t i = 0; i < slots; ++i) out.push_back(take_scratch<R>(p, backward, carve));
  return out;
}

// Words of row `first` and of the next one, which is zero if it is not below `end`.
[[maybe_unused]] inline void read_pair_of_rows(const WindowAttentionForward& p, const View& view,
                                               int64_t batch, int64_t head, int64_t first,
                                               int64_t end, float* to) {
  const hn::Rebind<uint16_t, Lanes<float>> d16;
  const hn::RebindToUnsigned<Lanes<float>> d32;
  const auto row = [&](int64_t i) {
    return reinterpret_cast<const uint16_t*>(element(view, p.dtype, batch, i, head * p.head_dim));
  };
  const uint16_t* a = row(first);
  const uint16_t* b = first + 1 < end ? row(first + 1) : nullptr;
  int64_t i = 0;
  for (; i + kLanes<float> <= p.head_dim; i += kLanes<float>) {
    const auto low = hn::PromoteTo(d32, hn::LoadU(d16, a + i));
    const auto high = b ? hn::PromoteTo(d32, hn::LoadU(d16, b + i)) : hn::Zero(d32);
    store<float>(hn::BitCast(Lanes<float>(), hn::Or(low, hn::ShiftLeft<16>(high))), to + i);
  }
  for (; i < p.head_dim; ++i)
    to[i] = std::bit_cast<float>(a[i] | uint32_t{b ? b[i] : uint16_t{0}} << 16);
}
// Rows of the right side of a product whose depth they are: numbers, or words of two rows.
template <class Kind, class R>
void read_block(const WindowAttentionForward& p, const View& view, int64_t batch, int64_t head,
                int64_t first, int64_t rows, int64_t dim, R* to) {
  if constexpr (Kind::kPerWord == 2) {
    for (int64_t i = 0; i < rows; i += 2, to += dim) {
      std::fill(to + p.head_dim, to + dim, R(0));
      read_pair_of_rows(p, view, batch, head, first + i, first + rows, to);
    }
    return;
  }
  for (int64_t i = 0; i < rows; ++i)
    read_row(element(view, p.dtype, batch, first + i, head * p.head_dim), p.dtype, p.head_dim, dim,
             to + i * dim);
}
// Keys or values of a tile as the left side of a product: in place, or a copy of bf16 numbers.
template <class Kind, class R>
Left<R> left_of_tile(const WindowAttentionForward& p, const View& view, const Block& b, int64_t key,
                     int64_t keys, int64_t dim, R* copy) {
  if (p.dtype != DType::bf16 || Kind::kPerWord == 2)
    return {
        reinterpret_cast<const R*>(element(view, p.dtype, b.batch, key, b.kv_head * p.head_dim)),
        view.time_stride / Kind::kPerWord, 1};
  read_block<Kind>(p, view, b.batch, b.kv_head, key, keys, dim, copy);
  return {copy, dim, 1};
}
// Reads the block's queries into `columns`. Those past the last hold zeros, which change no sum.
template <class Kind, class R>
void read_columns(const WindowAttentionForward& p, const View& view, const Block& b, R* row,
                  R* columns) {
  const int64_t words = p.head_dim / Kind::kPerWord;
  std::fill(columns, columns + words * kBlock, R(0));
  for (int64_t i = 0; i < b.rows; ++i) {
    const std::byte* from = element(view, p.dtype, b.batch, b.first + i, b.head * p.head_dim);
    if (Kind::kPerWord == 2) std::memcpy(row, from, size_t(2 * p.head_dim));
    else read_row(from, p.dtype, p.head_dim, p.head_dim, row);
    for (int64_t d = 0; d < words; ++d) columns[d * kBlock + i] = row[d];
  }
}
template <class R>
void write_block(const WindowAttentionForward& p, const View& view, const Block& b, int64_t dim,
                 const R* from) {
  for (int64_t i = 0; i < b.rows; ++i)
    write_row(from + i * dim, p.dtype, p.head_dim,
              element(view, p.dtype, b.batch, b.first + i, b.head * p.head_dim));
}

}  // namespace
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
