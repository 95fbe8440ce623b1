// What the forward and the backward of top-1 chunk attention on the CPU share. Compiled once a Highway target.
// Logits are kept in powers of two: queries are read times scale · log₂e, so that exp is exp2.
#if defined(ASSAY_OPS_TOP1_CHUNK_CPU_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASSAY_OPS_TOP1_CHUNK_CPU_INL_H_
#undef ASSAY_OPS_TOP1_CHUNK_CPU_INL_H_
#else
#define ASSAY_OPS_TOP1_CHUNK_CPU_INL_H_
#endif

#include <cmath>
#include <limits>

#include "ops/matmul-inl.h"
#include "ops/top1_chunk/kernel.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {  // each file its own

constexpr int64_t kRows = 32;     // queries a block of scores
constexpr int64_t kWorkers = 64;  // parts of a pass; each has scratch of its own

template <class R>
int64_t padded(int64_t n) {
  return (n + kLanes<R> - 1) / kLanes<R> * kLanes<R>;
}

// The problem with its derived sizes.
template <class R>
struct Problem : Top1ChunkForward {
  explicit Problem(const Top1ChunkForward& p)
      : Top1ChunkForward(p),
        size(p.past + p.time),
        C(std::min(p.chunk_size, size)),
        chunks((size + C - 1) / C),
        candidates(chunks - 1),
        group(p.heads / p.kv_heads),
        width(padded<R>(C)),
        depth(padded<R>(p.head_dim)) {}

  int64_t size;          // positions of k and v
  int64_t C, chunks;     // chunk_size ≤ size; the last chunk may be partial
  int64_t candidates;    // chunks that some query may select, all full
  int64_t group;         // query heads a key head
  int64_t width, depth;  // C and D in whole vectors

  int64_t keys(int64_t chunk) const { return std::min(C, size - chunk * C); }
  // The queries that stand in a chunk; none where end ≤ begin.
  int64_t first_query(int64_t chunk) const { return std::max(chunk * C - past, int64_t{0}); }
  int64_t last_query(int64_t chunk) const { return chunk * C + keys(chunk) - past; }
  int64_t row(int64_t b, int64_t h, int64_t t) const { return (b * heads + h) * time + t; }
};

// Runs body(item, scratch) for every item; `bytes` of scratch a worker.
template <class Body>
void for_each(int64_t items, std::byte* scratch, size_t bytes, const ParallelFor& parallel, const Body& body) {
  const int64_t workers = std::min(items, kWorkers);
  parallel(workers, 1, [&](int64_t begin, int64_t end) HWY_ATTR {
    for (int64_t i = begin * items / workers; i < end * items / workers; ++i) body(i, scratch + begin * bytes);
  });
}

// Row t of head h, times `factor`, in whole vectors.
template <class R>
HWY_INLINE void read_scaled(const Problem<R>& p, const View& view, int64_t b, int64_t t, int64_t h, R factor, R* out) {
  read_row(element(view, p.dtype, b, t, h * p.head_dim), p.dtype, p.head_dim, p.depth, out);
  for (int64_t d = 0; d < p.depth; d += kLanes<R>)
    store<R>(hn::Mul(load(out + d), hn::Set(Lanes<R>(), factor)), out + d);
}

// The keys (or values) of a chunk as rows [keys, depth].
template <class R>
void read_chunk(const Problem<R>& p, const View& view, int64_t b, int64_t h, int64_t chunk, R* rows) {
  for (int64_t j = 0; j < p.keys(chunk); ++j)
    read_row(element(view, p.dtype, b, chunk * p.C + j, h * p.head_dim), p.dtype, p.head_dim, p.depth,
             rows + j * p.depth);
}

// Keys or values with their rows as columns: for each [B, Hk, chunk] a matrix [D, width], zeros behind the last key.
template <class R>
struct Columns {
  Columns(Carver& carve, const Problem<R>& p)
      : data(carve.take<R>(p.batch * p.kv_heads * p.chunks * p.head_dim * p.width)) {}
  const R* at(const Problem<R>& p, int64_t b, int64_t h, int64_t chunk) const {
    return data + ((b * p.kv_heads + h) * p.chunks + chunk) * p.head_dim * p.width;
  }
  R* data;
};

template <class R>
void pack_columns(const Problem<R>& p, const View& view, Columns<R>& columns, std::byte* scratch, size_t bytes,
                  const ParallelFor& parallel) {
  constexpr int64_t kAtOnce = 16;
  for_each(p.batch * p.kv_heads * p.chunks, scratch, bytes, parallel, [&](int64_t i, std::byte* memory) HWY_ATTR {
    R* rows = reinterpret_cast<R*>(memory);  // [kAtOnce, depth]
    R* out = columns.data + i * p.head_dim * p.width;
    const int64_t chunk = i % p.chunks, h = i / p.chunks % p.kv_heads, b = i / p.chunks / p.kv_heads;
    for (int64_t j = 0; j < p.width; j += kAtOnce) {
      const int64_t some = std::min(kAtOnce, p.width - j);
      for (int64_t l = 0; l < some; ++l) {
        if (j + l < p.keys(chunk))
          read_row(element(view, p.dtype, b, chunk * p.C + j + l, h * p.head_dim), p.dtype, p.head_dim, p.depth,
                   rows + l * p.depth);
        else std::fill_n(rows + l * p.depth, p.depth, R(0));
      }
      for (int64_t d = 0; d < p.head_dim; ++d)
        for (int64_t l = 0; l < some; ++l) out[d * p.width + j + l] = rows[l * p.depth + d];
    }
  });
}

// For each [B, H, slot], the queries by the chunk they selected there, in rising order: a counting sort.
template <class R>
struct Lists {
  Lists(Carver& carve, const Problem<R>& p)
      : order(carve.take<int32_t>(p.batch * p.heads * p.top_k * p.time)),
        begin(carve.take<int32_t>(p.batch * p.heads * p.top_k * (p.chunks + 1))) {}
  int32_t *order, *begin;  // [B, H, top_k, T], [B, H, top_k, candidates + 2]

  std::pair<const int32_t*, const int32_t*> of(const Problem<R>& p, int64_t b, int64_t h, int64_t slot,
                                               int64_t chunk) const {
    const int64_t list = (b * p.heads + h) * p.top_k + slot;
    const int32_t *offsets = begin + list * (p.chunks + 1), *queries = order + list * p.time;
    return {queries + offsets[chunk], queries + offsets[chunk + 1]};
  }
};

template <class R>
void sort_queries(const Problem<R>& p, const Lists<R>& lists, const ParallelFor& parallel) {
  parallel(p.batch * p.heads * p.top_k, 1, [&](int64_t first, int64_t last) {
    for (int64_t list = first; list < last; ++list) {
      const int64_t* selected = p.selected + list / p.top_k * p.time * p.top_k + list % p.top_k;
      int32_t *offsets = lists.begin + list * (p.chunks + 1), *queries = lists.order + list * p.time;
      auto chunk_of = [&](int64_t t) {  // −1 unless it is a candidate of t
        const int64_t chunk = selected[t * p.top_k];
        return chunk >= 0 && chunk < (p.past + t) / p.C ? chunk : int64_t{-1};
      };
      std::fill_n(offsets, p.chunks + 1, 0);
      for (int64_t t = 0; t < p.time; ++t)
        if (const int64_t chunk = chunk_of(t); chunk >= 0) ++offsets[chunk + 2];
      for (int64_t c = 2; c <= p.chunks; ++c) offsets[c] += offsets[c - 1];  // offsets[c + 1]: where chunk c begins,
      for (int64_t t = 0; t < p.time; ++t)                                   // and below, where it ends
        if (const int64_t chunk = chunk_of(t); chunk >= 0) queries[offsets[chunk + 1]++] = static_cast<int32_t>(t);
    }
  });
}

}  // namespace
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
