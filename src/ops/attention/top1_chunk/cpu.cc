// The forward of top-1 chunk attention on the CPU.
//   1. keys of each chunk as columns; their means                     2. each query's best chunks
//   3. for each slot, queries sorted by the chunk they chose (cpu-inl.h)
//   4. for each slot, one task per chunk: the queries that chose it read its keys; each has one
//      such chunk, so one writer
//   5. one task per chunk: its own queries read it up to themselves and finish
// Between passes a query holds out unnormalised, the largest logit seen, and the sum of
// exponentials relative to it.
#include "ops/attention/top1_chunk/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/attention/top1_chunk/cpu.cc"
#include "ops/cpu/highway.h"
//
#include "ops/attention/top1_chunk/cpu-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <class R>
struct Scratch {
  R* q;
  R* scores;
  R* out;
  R* values;
  R* best;
  Scratch(WorkspaceArena& carve, const Problem<R>& p)
      : q(carve.take<R>((p.C + kRows) * p.depth)),
        scores(carve.take<R>(kRows * std::max(p.width, padded<R>(p.candidates)))),
        out(carve.take<R>(kRows * p.depth)),
        values(carve.take<R>(p.C * p.depth)),
        best(carve.take<R>(p.C * p.top_k)) {}
};

template <class R>
struct Memory {
  Columns<R> keys;
  R* means;  // [B, Hk, D, candidates in whole vectors]
  Lists<R> lists;
  // [B, H, T, depth], [B, H, T] twice
  R* out;
  R* largest;
  R* sum;
  std::byte* scratch;  // kWorkers times scratch_bytes
  size_t scratch_bytes;
  Memory(WorkspaceArena& carve, const Problem<R>& p)
      : keys(carve, p),
        means(carve.take<R>(p.batch * p.kv_heads * p.head_dim * padded<R>(p.candidates))),
        lists(carve, p),
        out(carve.take<R>(p.batch * p.heads * p.time * p.depth)),
        largest(carve.take<R>(p.batch * p.heads * p.time)),
        sum(carve.take<R>(p.batch * p.heads * p.time)) {
    WorkspaceArena count;
    Scratch<R>(count, p);
    scratch_bytes = count.used();
    scratch =
        carve.take<std::byte>(std::min(kWorkers, p.batch * p.heads * p.chunks) * scratch_bytes);
  }
};

template <class R>
void mean_keys(const Problem<R>& p, const Memory<R>& m, const ParallelFor& parallel) {
  const int64_t stride = padded<R>(p.candidates);
  for_each(p.batch * p.kv_heads * p.candidates, m.scratch, m.scratch_bytes, parallel,
           [&](int64_t i, std::byte* memory) HWY_ATTR {
             WorkspaceArena carve(memory);
             const Scratch<R> s(carve, p);
             const int64_t chunk = i % p.candidates;
             const int64_t h = i / p.candidates % p.kv_heads;
             const int64_t b = i / p.candidates / p.kv_heads;
             R* rows = s.values;
             R* mean = s.q;
             R* out = m.means + (b * p.kv_heads + h) * p.head_dim * stride + chunk;
             read_chunk(p, p.k, b, h, chunk, rows);
             std::fill_n(mean, p.depth, R(0));
             for (int64_t j = 0; j < p.C; ++j)
               for (int64_t d = 0; d < p.depth; d += kLanes<R>)
                 store<R>(hn::Add(load(mean + d), load(rows + j * p.depth + d)), mean + d);
             for (int64_t d = 0; d < p.head_dim; ++d) out[d * stride] = mean[d] / R(p.C);
           });
}

// The scores q · mean(k) of `rows` queries against the first `chunk` chunks, a block at a time.
template <class R>
void select_approx(const Problem<R>& p, const Memory<R>& m, const Scratch<R>& s, int64_t b,
                   int64_t h, int64_t chunk) {
  const int64_t stride = padded<R>(p.candidates);
  const int64_t begin = p.first_query(chunk);
  const int64_t end = p.last_query(chunk);
  const R* means = m.means + (b * p.kv_heads + h / p.group) * p.head_dim * stride;
  for (int64_t t0 = begin; t0 < end; t0 += kRows) {
    const int64_t rows = std::min(kRows, end - t0);
    for (int64_t i = 0; i < rows; ++i) read_scaled(p, p.q, b, t0 + i, h, R(1), s.q + i * p.depth);
    matmul(rows, padded<R>(chunk), p.head_dim, Left<R>{s.q, p.depth, 1}, means, stride, s.scores,
           stride, false);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t c = 0; c < chunk; ++c)
        consider(s.scores[i * stride + c], c, c, p.top_k, s.best,
                 p.selected + p.row(b, h, t0 + i) * p.top_k);
  }
}

// log₂ Σ_j 2^(q·k_j), for the queries of a chunk against each earlier chunk, whose keys stay
// in cache meanwhile.
template <class R>
void select_exact(const Problem<R>& p, const Memory<R>& m, const Scratch<R>& s, int64_t b,
                  int64_t h, int64_t chunk) {
  const int64_t begin = p.first_query(chunk);
  const int64_t count = p.last_query(chunk) - begin;
  for (int64_t i = 0; i < count; ++i)
    read_scaled(p, p.q, b, begin + i, h, R(p.scale * kLog2E), s.q + i * p.depth);
  for (int64_t c = 0; c < chunk; ++c)
    for (int64_t i0 = 0; i0 < count; i0 += kRows) {
      const int64_t rows = std::min(kRows, count - i0);
      matmul(rows, p.width, p.head_dim, Left<R>{s.q + i0 * p.depth, p.depth, 1},
             m.keys.at(p, b, h / p.group, c), p.width, s.scores, p.width, false);
      for (int64_t i = 0; i < rows; ++i) {
        const R score = logsumexp2(s.scores + i * p.width, p.C);
        consider(score, c, c, p.top_k, s.best + (i0 + i) * p.top_k,
                 p.selected + p.row(b, h, begin + i0 + i) * p.top_k);
      }
    }
}

template <class R>
void select(const Problem<R>& p, const Memory<R>& m, const ParallelFor& parallel) {
  std::fill_n(p.selected, p.batch * p.heads * p.time * p.top_k, int64_t{-1});
  if (p.selection == Selection::approx) mean_keys(p, m, parallel);
  for_each(p.batch * p.heads * p.chunks, m.scratch, m.scratch_bytes, parallel,
           [&](int64_t i, std::byte* memory) HWY_ATTR {
             WorkspaceArena carve(memory);
             const Scratch<R> s(carve, p);
             const auto [b, h, chunk] = place(p, i);
             if (p.selection == Selection::approx) select_approx(p, m, s, b, h, chunk);
             else select_exact(p, m, s, b, h, chunk);
           });
}

// One more softmax block for the queries s.q: `rows` of them read the first limit(i) of `count`
// keys, and the query in row i, at `index(i)` of [B, H, T], goes from what it held to what it holds
// now; s.out is its unnormalised output.
template <class R, class Index, class Limit>
void attend(const Problem<R>& p, const Memory<R>& m, const Scratch<R>& s, int64_t rows,
            int64_t count, const R* keys, const Index& index, const Limit& limit) {
  matmul(rows, padded<R>(count), p.head_dim, Left<R>{s.q, p.depth, 1}, keys, p.width, s.scores,
         p.width, false);
  for (int64_t i = 0; i < rows; ++i) {
    R* row = s.scores + i * p.width;
    R* out = s.out + i * p.depth;
    R& largest = m.largest[index(i)];
    R& sum = m.sum[index(i)];
    const R before = largest;
    const R found = largest_of(row, limit(i));
    largest = before < found ? found : before;
    exponentials(row, limit(i), count, largest);
    const R total = sum_of(row, limit(i));
    if (total != total) largest = total;  // maxima may pass over a NaN
    if (before == R(-kInfinity)) {
      std::fill_n(out, p.depth, R(0));
      sum = total;
      continue;
    }
    const R shrink = std::exp2(before - largest);
    scale_row(m.out + index(i) * p.depth, p.depth, shrink, out);
    sum = sum * shrink + total;
  }
  matmul(rows, p.depth, count, Left<R>{s.scores, p.width, 1}, s.values, p.depth, s.out, p.depth,
         true);
}

// The queries that chose chunk `chunk` in this slot.
template <class R>
void remote_pass(const Problem<R>& p, const Memory<R>& m, const Scratch<R>& s, int64_t slot,
                 int64_t b, int64_t h, int64_t chunk) {
  const auto [begin, end] = m.lists.of(p, b, h, slot, chunk);
  if (begin == end) return;
  read_chunk(p, p.v, b, h / p.group, chunk, s.values);
  for (const int32_t* at = begin; at < end; at += kRows) {
    const int64_t rows = std::min<int64_t>(kRows, end - at);
    for (int64_t i = 0; i < rows; ++i)
      read_scaled(p, p.q, b, at[i], h, R(p.scale * kLog2E), s.q + i * p.depth);
    auto index = [&](int64_t i) { return p.row(b, h, at[i]); };
    attend(p, m, s, rows, p.C, m.keys.at(p, b, h / p.group, chunk), index,
           [&](int64_t) { return p.C; });
    for (int64_t i = 0; i < rows; ++i)
      std::copy_n(s.out + i * p.depth, p.depth, m.out + index(i) * p.depth);
  }
}

// The queries of chunk `chunk` over their own chunk; their outputs are finished.
template <class R>
void local_pass(const Problem<R>& p, const Memory<R>& m, const Scratch<R>& s, int64_t b, int64_t h,
                int64_t chunk) {
  const int64_t begin = p.first_query(chunk);
  const int64_t end = p.last_query(chunk);
  if (begin >= end) return;
  read_chunk(p, p.v, b, h / p.group, chunk, s.values);
  for (int64_t t0 = begin; t0 < end; t0 += kRows) {
    // by the first of them
    const int64_t rows = std::min(kRows, end - t0);
    const int64_t seen = p.past + t0 - chunk * p.C + 1;
    for (int64_t i = 0; i < rows; ++i)
      read_scaled(p, p.q, b, t0 + i, h, R(p.scale * kLog2E), s.q + i * p.depth);
    auto index = [&](int64_t i) { return p.row(b, h, t0 + i); };
    attend(p, m, s, rows, seen + rows - 1, m.keys.at(p, b, h / p.group, chunk), index,
           [&](int64_t i) { return seen + i; });
    for (int64_t i = 0; i < rows; ++i) {
      const R sum = m.sum[index(i)];
      write_scaled(p, p.out, b, t0 + i, h, R(1) / sum, s.out + i * p.depth);
      static_cast<R*>(p.logsumexp)[index(i)] =
          static_cast<R>((m.largest[index(i)] + std::log2(sum)) / kLog2E);
    }
  }
}

template <class R>
void forward(const Top1ChunkForward& call, void* workspace, const ParallelFor& parallel) {
  const Problem<R> p(call);
  WorkspaceArena carve(workspace);
  Memory<R> m(carve, p);
  pack_columns(p, p.k, m.keys, m.scratch, m.scratch_bytes, parallel);
  if (!p.forced) select(p, m, parallel);
  sort_queries(p, m.lists, parallel);
  std::fill_n(m.largest, p.batch * p.heads * p.time, R(-kInfinity));
  auto pass = [&](int64_t chunks, const auto& body) {
    for_each(p.batch * p.heads * chunks, m.scratch, m.scratch_bytes, parallel,
             [&](int64_t i, std::byte* memory) HWY_ATTR {
               WorkspaceArena scratch(memory);
               body(Scratch<R>(scratch, p), i / chunks / p.heads, i / chunks % p.heads, i % chunks);
             });
  };
  for (int64_t slot = 0; slot < p.top_k; ++slot)
    pass(p.candidates, [&](const Scratch<R>& s, int64_t b, int64_t h, int64_t chunk)
                           HWY_ATTR { remote_pass(p, m, s, slot, b, h, chunk); });
  pass(p.chunks, [&](const Scratch<R>& s, int64_t b, int64_t h, int64_t chunk)
                     HWY_ATTR { local_pass(p, m, s, b, h, chunk); });
}

template <class R>
size_t bytes_of(const Top1ChunkForward& call) {
  WorkspaceArena count;
  Memory<R>(count, Problem<R>(call));
  return count.used();
}

size_t top1_chunk_forward_bytes(const Top1ChunkForward& p) {
  return p.dtype == DType::f64 ? bytes_of<double>(p) : bytes_of<float>(p);
}
void top1_chunk_run_forward(const Top1ChunkForward& p, void* workspace,
                            const ParallelFor& parallel) {
  p.dtype == DType::f64 ? forward<double>(p, workspace, parallel)
                        : forward<float>(p, workspace, parallel);
}

}  // namespace
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace assay::ops::cpu {
HWY_EXPORT(top1_chunk_forward_bytes);
size_t workspace_bytes(const Top1ChunkForward& p) {
  return HWY_DYNAMIC_DISPATCH(top1_chunk_forward_bytes)(p);
}
ASSAY_CPU_WORKSPACE_KERNEL(top1_chunk, top1_chunk_run_forward, Top1ChunkForward)
}  // namespace assay::ops::cpu
#endif
