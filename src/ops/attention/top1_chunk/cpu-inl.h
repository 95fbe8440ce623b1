// Code shared by the forward and the backward of top-1 chunk attention on the CPU. Compiled once
// per Highway target.
#if defined(ASSAY_OPS_TOP1_CHUNK_CPU_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASSAY_OPS_TOP1_CHUNK_CPU_INL_H_
#undef ASSAY_OPS_TOP1_CHUNK_CPU_INL_H_
#else
#define ASSAY_OPS_TOP1_CHUNK_CPU_INL_H_
#endif

#include "ops/attention/top1_chunk/kernel.h"
#include "ops/cpu/chunks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {

template <class R>
struct Problem : Chunked<Top1ChunkForward, R> {
  explicit Problem(const Top1ChunkForward& p)
      : Chunked<Top1ChunkForward, R>(p, p.chunk_size), candidates(this->chunks - 1) {}
  int64_t candidates;  // chunks that some query may select, all full
};

// For each [B, H, slot], the queries by the chunk they selected there, in rising order:
// a counting sort.
template <class R>
struct Lists {
  Lists(WorkspaceArena& carve, const Problem<R>& p)
      : order(carve.take<int32_t>(p.batch * p.heads * p.top_k * p.time)),
        begin(carve.take<int32_t>(p.batch * p.heads * p.top_k * (p.chunks + 1))) {}
  // [B, H, top_k, T], [B, H, top_k, candidates + 2]
  int32_t* order;
  int32_t* begin;

  std::pair<const int32_t*, const int32_t*> of(const Problem<R>& p, int64_t b, int64_t h,
                                               int64_t slot, int64_t chunk) const {
    const int64_t list = (b * p.heads + h) * p.top_k + slot;
    const int32_t* offsets = begin + list * (p.chunks + 1);
    const int32_t* queries = order + list * p.time;
    return {queries + offsets[chunk], queries + offsets[chunk + 1]};
  }
};

template <class R>
void sort_queries(const Problem<R>& p, const Lists<R>& lists, const ParallelFor& parallel) {
  parallel(p.batch * p.heads * p.top_k, 1, [&](int64_t first, int64_t last) {
    for (int64_t list = first; list < last; ++list) {
      const int64_t* selected = p.selected + list / p.top_k * p.time * p.top_k + list % p.top_k;
      int32_t* offsets = lists.begin + list * (p.chunks + 1);
      int32_t* queries = lists.order + list * p.time;
      auto chunk_of = [&](int64_t t) {  // −1 unless it is a candidate of t
        const int64_t chunk = selected[t * p.top_k];
        return chunk >= 0 && chunk < (p.past + t) / p.C ? chunk : int64_t{-1};
      };
      std::fill_n(offsets, p.chunks + 1, 0);
      for (int64_t t = 0; t < p.time; ++t)
        if (const int64_t chunk = chunk_of(t); chunk >= 0) ++offsets[chunk + 2];
      // offsets[c + 1]: where chunk c begins,
      for (int64_t c = 2; c <= p.chunks; ++c) offsets[c] += offsets[c - 1];
      // and below, where it ends
      for (int64_t t = 0; t < p.time; ++t)
        if (const int64_t chunk = chunk_of(t); chunk >= 0)
          queries[offsets[chunk + 1]++] = static_cast<int32_t>(t);
    }
  });
}

// Keeps the top_k best scores of a query, best first; `known` of them so far. A NaN is best, equal
// ones stay in order.
template <class R>
HWY_INLINE void consider(R score, int64_t chunk, int64_t known, int64_t top_k, R* best,
                         int64_t* selected) {
  auto better = [](R a, R b) { return !(a <= b) && b == b; };
  int64_t at = std::min(known, top_k);
  if (at == top_k && !better(score, best[--at])) return;
  for (; at > 0 && better(score, best[at - 1]); --at) {
    best[at] = best[at - 1];
    selected[at] = selected[at - 1];
  }
  best[at] = score;
  selected[at] = chunk;
}

// log₂ Σ_j 2^x_j of `count` numbers, which are overwritten.
template <class R>
HWY_INLINE R logsumexp2(R* row, int64_t count) {
  const R top = largest_of(row, count);
  exponentials(row, count, count, top);
  return top + std::log2(sum_of(row, count));
}

}  // namespace
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
