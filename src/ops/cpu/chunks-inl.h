// Attention on the CPU by chunks of keys: sizes, passes over tasks, rows and columns in scratch.
// Compiled once a Highway target. Logits are kept in powers of two: queries are read times scale ·
// log₂e, so that exp is exp2.
#if defined(ASSAY_OPS_CHUNKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASSAY_OPS_CHUNKS_INL_H_
#undef ASSAY_OPS_CHUNKS_INL_H_
#else
#define ASSAY_OPS_CHUNKS_INL_H_
#endif

#include <cmath>
#include <limits>

#include "ops/cpu/matmul-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {  // each file its own

constexpr int64_t kRows = 32;     // queries a block of scores
constexpr int64_t kWorkers = 64;  // parts of a pass; each has scratch of its own

template <class R>
int64_t padded(int64_t n) {
  return (n + kLanes<R> - 1) / kLanes<R> * kLanes<R>;
}

// An operator's call with its derived sizes.
template <class Call, class R>
struct Chunked : Call {
  using Real = R;
  Chunked(const Call& p, int64_t chunk_size)
      : Call(p),
        size(p.past + p.time),
        C(std::min(chunk_size, size)),
        chunks((size + C - 1) / C),
        group(p.heads / p.kv_heads),
        width(padded<R>(C)),
        depth(padded<R>(p.head_dim)) {}

  int64_t size;  // positions of k and v
  // chunk_size ≤ size; the last chunk may be partial
  int64_t C;
  int64_t chunks;
  int64_t group;  // query heads a key head
  // C and D in whole vectors
  int64_t width;
  int64_t depth;

  int64_t keys(int64_t chunk) const { return std::min(C, size - chunk * C); }
  // The queries that are in a chunk; none where end ≤ begin.
  int64_t first_query(int64_t chunk) const { return std::max(chunk * C - this->past, int64_t{0}); }
  int64_t last_query(int64_t chunk) const { return chunk * C + keys(chunk) - this->past; }
  int64_t row(int64_t b, int64_t h, int64_t t) const {
    return (b * this->heads + h) * this->time + t;
  }
};

// Runs body(item, scratch) for every item; `bytes` of scratch a worker.
template <class Body>
void for_each(int64_t items, std::byte* scratch, size_t bytes, const ParallelFor& parallel,
              const Body& body) {
  const int64_t workers = std::min(items, kWorkers);
  parallel(workers, 1, [&](int64_t begin, int64_t end) HWY_ATTR {
    for (int64_t i = begin * items / workers; i < end * items / workers; ++i)
      body(i, scratch + begin * bytes);
  });
}

// Row t of head h, times `factor`, in whole vectors.
template <class P, class R>
HWY_INLINE void read_scaled(const P& p, const View& view, int64_t b, int64_t t, int64_t h, R factor,
                            R* out) {
  read_row(element(view, p.dtype, b, t, h * p.head_dim), p.dtype, p.head_dim, p.depth, out);
  for (int64_t d = 0; d < p.depth; d += kLanes<R>)
    store<R>(hn::Mul(load(out + d), hn::Set(Lanes<R>(), factor)), out + d);
}

// The keys (or values) of a chunk as rows [keys, depth].
template <class P, class R>
void read_chunk(const P& p, const View& view, int64_t b, int64_t h, int64_t chunk, R* rows) {
  for (int64_t j = 0; j < p.keys(chunk); ++j)
    read_row(element(view, p.dtype, b, chunk * p.C + j, h * p.head_dim), p.dtype, p.head_dim,
             p.depth, rows + j * p.depth);
}

// Keys or values with their rows as columns: for each [B, Hk, chunk] a matrix [D, width], zeros
// past the last key.
template <class R>
struct Columns {
  template <class P>
  Columns(WorkspaceArena& carve, const P& p)
      : data(carve.take<R>(p.batch * p.kv_heads * p.chunks * p.head_dim * p.width)) {}
  template <class P>
  const R* at(const P& p, int64_t b, int64_t h, int64_t chunk) const {
    return data + ((b * p.kv_heads + h) * p.chunks + chunk) * p.head_dim * p.width;
  }
  R* data;
};

template <class P, class R>
void pack_columns(const P& p, const View& view, Columns<R>& columns, std::byte* scratch,
                  size_t bytes, const ParallelFor& parallel) {
  constexpr int64_t kAtOnce = 16;
  for_each(p.batch * p.kv_heads * p.chunks, scratch, bytes, parallel,
           [&](int64_t i, std::byte* memory) HWY_ATTR {
             R* rows = reinterpret_cast<R*>(memory);  // [kAtOnce, depth]
             R* out = columns.data + i * p.head_dim * p.width;
             const int64_t chunk = i % p.chunks;
             const int64_t h = i / p.chunks % p.kv_heads;
             const int64_t b = i / p.chunks / p.kv_heads;
             for (int64_t j = 0; j < p.width; j += kAtOnce) {
               const int64_t some = std::min(kAtOnce, p.width - j);
               for (int64_t l = 0; l < some; ++l) {
                 if (j + l < p.keys(chunk))
                   read_row(element(view, p.dtype, b, chunk * p.C + j + l, h * p.head_dim), p.dtype,
                            p.head_dim, p.depth, rows + l * p.depth);
                 else std::fill_n(rows + l * p.depth, p.depth, R(0));
               }
               for (int64_t d = 0; d < p.head_dim; ++d)
                 for (int64_t l = 0; l < some; ++l)
                   out[d * p.width + j + l] = rows[l * p.depth + d];
             }
           });
}

// max over [0, n), n > 0, after the rest of the last vector was set to −∞. May pass over a NaN.
template <class R>
HWY_INLINE R largest_of(R* row, int64_t n) {
  std::fill(row + n, row + padded<R>(n), -std::numeric_limits<R>::infinity());
  Vec<R> top = load(row);
  for (int64_t j = kLanes<R>; j < n; j += kLanes<R>) top = hn::Max(top, load(row + j));
  return hn::GetLane(hn::MaxOfLanes(Lanes<R>(), top));
}
// row ← 2^(row − shift) over [0, n), 0 after it up to `count` in whole vectors.
template <class R>
HWY_INLINE void exponentials(R* row, int64_t n, int64_t count, R shift) {
  const Vec<R> by = hn::Set(Lanes<R>(), shift);
  for (int64_t j = 0; j < n; j += kLanes<R>) store<R>(exp2(hn::Sub(load(row + j), by)), row + j);
  std::fill(row + n, row + padded<R>(count), R(0));
}
template <class R>
HWY_INLINE R sum_of(const R* row, int64_t n) {  // whole vectors
  Vec<R> total = load(row);
  for (int64_t j = kLanes<R>; j < n; j += kLanes<R>) total = hn::Add(total, load(row + j));
  return sum<R>(total);
}
// out ← row · factor
template <class R>
HWY_INLINE void scale_row(const R* row, int64_t n, R factor, R* out) {
  for (int64_t d = 0; d < n; d += kLanes<R>)
    store<R>(hn::Mul(load(row + d), hn::Set(Lanes<R>(), factor)), out + d);
}
template <class R>
HWY_INLINE R dot(const R* a, const R* b, int64_t n) {
  Vec<R> total = set<R>(0);
  for (int64_t d = 0; d < n; d += kLanes<R>) total = hn::MulAdd(load(a + d), load(b + d), total);
  return sum<R>(total);
}
// Row t of head h ← row · factor; row is overwritten.
template <class P, class R>
void write_scaled(const P& p, const View& view, int64_t b, int64_t t, int64_t h, R factor, R* row) {
  scale_row(row, p.depth, factor, row);
  write_row(row, p.dtype, p.head_dim, element(view, p.dtype, b, t, h * p.head_dim));
}

// Item i of B·H·chunks; neighbours pair an early chunk with a late one, so that equal parts
// are equal work.
struct Place {
  int64_t b;
  int64_t h;
  int64_t chunk;
};
template <class P>
Place place(const P& p, int64_t i) {
  const int64_t at = i % p.chunks;
  return {i / p.chunks / p.heads, i / p.chunks % p.heads, at % 2 ? p.chunks - 1 - at / 2 : at / 2};
}

}  // namespace
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
