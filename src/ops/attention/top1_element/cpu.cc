// Top-1 element attention on the CPU, in chunks of keys.
//   forward   one task per chunk of queries. It computes the scores of one chunk of keys at a time
//           and keeps the largest score, its position, the sum of the softmax and, if a gradient is
//             wanted, its output.
//   backward  one task per key head. A chunk of keys meets its queries; dk is finished with the
//             chunk, dq grows. Heads that share a key head are processed in turn, so no row has two
//             writers.
#include "ops/attention/top1_element/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/attention/top1_element/cpu.cc"
#include "ops/cpu/highway.h"
//
#include "ops/cpu/chunks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {

constexpr int64_t kChunk = 128;

template <class R>
struct Problem : Chunked<Top1ElementForward, R> {
  explicit Problem(const Top1ElementForward& p) : Chunked<Top1ElementForward, R>(p, kChunk) {}
};

template <class R>
struct ForwardScratch {
  R* q;
  R* soft;
  R* scores;
  R* values;
  R* largest;
  R* sum;
  ForwardScratch(WorkspaceArena& carve, const Problem<R>& p)
      : q(carve.take<R>(p.C * p.depth)),
        soft(carve.take<R>(p.C * p.depth)),
        scores(carve.take<R>(kRows * p.width)),
        values(carve.take<R>(p.C * p.depth)),
        largest(carve.take<R>(p.C)),
        sum(carve.take<R>(p.C)) {}
};

// Counts, then gives out, `tasks` scratches of one kind.
template <class Scratch, class P>
std::pair<std::byte*, size_t> scratches(WorkspaceArena& carve, const P& p, int64_t tasks) {
  WorkspaceArena count;
  Scratch(count, p);
  return {carve.take<std::byte>(std::min(kWorkers, tasks) * count.used()), count.used()};
}

template <class R>
struct ForwardMemory {
  Columns<R> keys;
  std::pair<std::byte*, size_t> scratch;
  ForwardMemory(WorkspaceArena& carve, const Problem<R>& p)
      : keys(carve, p),
        scratch(scratches<ForwardScratch<R>>(carve, p, p.batch * p.heads * p.chunks)) {}
};

// A row of n scores, the first at position `first`, joins a query; the row becomes its weights.
template <class R>
void join(R* row, int64_t n, int64_t count, int64_t first, R& largest, R& sum, int64_t& index,
          R* soft, int64_t depth) {
  const R before = largest;
  const R found = largest_of(row, n);
  if (before < found) {
    largest = found;
    index = first + (std::find(row, row + n, found) - row);
  }
  exponentials(row, n, count, largest);
  const R total = sum_of(row, n);
  if (total != total) largest = total;  // maxima may pass over a NaN
  const R shrink = before == largest ? R(1) : std::exp2(before - largest);
  sum = sum * shrink + total;
  if (soft && shrink != R(1)) scale_row(soft, depth, shrink, soft);
}

// The queries of a chunk over the keys of chunk `c`.
template <class R>
void read_keys(const Problem<R>& p, const ForwardMemory<R>& m, const ForwardScratch<R>& s,
               const Place& at, int64_t c) {
  const int64_t kv_head = at.h / p.group;
  const int64_t begin = p.first_query(at.chunk);
  const int64_t count = p.last_query(at.chunk) - begin;
  if (p.soft) read_chunk(p, p.v, at.b, kv_head, c, s.values);
  for (int64_t i0 = 0; i0 < count; i0 += kRows) {
    const int64_t rows = std::min(kRows, count - i0);
    const int64_t position = p.past + begin + i0;
    const int64_t keys = std::min(p.keys(c), position + rows - c * p.C);  // that the last row sees
    matmul(rows, padded<R>(keys), p.head_dim, Left<R>{s.q + i0 * p.depth, p.depth, 1},
           m.keys.at(p, at.b, kv_head, c), p.width, s.scores, p.width, false);
    for (int64_t i = 0; i < rows; ++i)
      join(s.scores + i * p.width, std::min(keys, position + i + 1 - c * p.C), keys, c * p.C,
           s.largest[i0 + i], s.sum[i0 + i], p.index[p.row(at.b, at.h, begin + i0 + i)],
           p.soft ? s.soft + (i0 + i) * p.depth : nullptr, p.depth);
    if (p.soft)
      matmul(rows, p.depth, keys, Left<R>{s.scores, p.width, 1}, s.values, p.depth,
             s.soft + i0 * p.depth, p.depth, true);
  }
}

template <class R>
void finish_query(const Problem<R>& p, const ForwardScratch<R>& s, const Place& at, int64_t t,
                  int64_t i) {
  const int64_t row = p.row(at.b, at.h, t);
  const std::byte* value = element(p.v, p.dtype, at.b, p.index[row], at.h / p.group * p.head_dim);
  read_row(value, p.dtype, p.head_dim, p.depth, s.q);
  const R sum = s.sum[i];
  write_scaled(p, p.out, at.b, t, at.h, sum == sum ? R(1) : sum, s.q);
  if (!p.soft) return;
  static_cast<R*>(p.logsumexp)[row] = static_cast<R>((s.largest[i] + std::log2(sum)) / kLog2E);
  scale_row(s.soft + i * p.depth, p.depth, R(1) / sum, s.q);
  std::copy_n(s.q, p.head_dim, static_cast<R*>(p.soft) + row * p.head_dim);
}

template <class R>
void forward(const Top1ElementForward& call, void* workspace, const ParallelFor& parallel) {
  const Problem<R> p(call);
  WorkspaceArena carve(workspace);
  ForwardMemory<R> m(carve, p);
  const auto [memory, bytes] = m.scratch;
  pack_columns(p, p.k, m.keys, memory, bytes, parallel);
  for_each(p.batch * p.heads * p.chunks, memory, bytes, parallel,
           [&](int64_t item, std::byte* own) HWY_ATTR {
             WorkspaceArena scratch(own);
             const ForwardScratch<R> s(scratch, p);
             const Place at = place(p, item);
             const int64_t begin = p.first_query(at.chunk);
             const int64_t count = p.last_query(at.chunk) - begin;
             for (int64_t i = 0; i < count; ++i) {
               read_scaled(p, p.q, at.b, begin + i, at.h, R(p.scale * kLog2E), s.q + i * p.depth);
               s.largest[i] = -std::numeric_limits<R>::infinity();
               s.sum[i] = 0;
               p.index[p.row(at.b, at.h, begin + i)] = 0;
               std::fill_n(s.soft + i * p.depth, p.depth, R(0));
             }
             for (int64_t c = 0; count > 0 && c <= at.chunk; ++c) read_keys(p, m, s, at, c);
             for (int64_t i = 0; i < count; ++i) finish_query(p, s, at, begin + i, i);
           });
}

template <class R>
struct BackwardScratch {
  R* q;
  R* dout;
  R* P;
  R* dS;
  R* keys;
  R* row;
  BackwardScratch(WorkspaceArena& carve, const Problem<R>& p)
      : q(carve.take<R>(kRows * p.depth)),
        dout(carve.take<R>(kRows * p.depth)),
        P(carve.take<R>(kRows * p.width)),
        dS(carve.take<R>(kRows * p.width)),
        keys(carve.take<R>(p.C * p.depth)),
        row(carve.take<R>(p.depth)) {}
};

// dq lacks its factor s, dk its factor ln 2: it is summed from queries that were read times
// s · log₂e.
template <class R>
struct BackwardMemory {
  Columns<R> keys;
  Columns<R> values;
  // [B, H, T, depth], [B, Hk, past + T, depth] twice
  R* dq;
  R* dk;
  R* dv;
  R* delta;  // [B, H, T]: dout · soft
  std::pair<std::byte*, size_t> scratch;
  BackwardMemory(WorkspaceArena& carve, const Problem<R>& p)
      : keys(carve, p),
        values(carve, p),
        dq(carve.take<R>(p.batch * p.heads * p.time * p.depth)),
        dk(carve.take<R>(p.batch * p.kv_heads * p.size * p.depth)),
        dv(carve.take<R>(p.batch * p.kv_heads * p.size * p.depth)),
        delta(carve.take<R>(p.batch * p.heads * p.time)),
        scratch(scratches<BackwardScratch<R>>(carve, p, p.batch * p.kv_heads * p.chunks)) {}
};

// The work of a task: a key head with its gradients.
template <class R>
struct Target {
  int64_t b;
  int64_t kv_head;
  // [past + T, depth]
  R* dk;
  R* dv;
};

// δ and dv, which need no scores.
template <class R>
void read_gradients(const Top1ElementBackward& call, const Problem<R>& p,
                    const BackwardMemory<R>& m, const BackwardScratch<R>& s,
                    const Target<R>& target, int64_t h) {
  std::fill_n(s.row, p.depth, R(0));
  for (int64_t t = 0; t < p.time; ++t) {
    const int64_t row = p.row(target.b, h, t);
    read_scaled(p, call.dout, target.b, t, h, R(1), s.dout);
    std::copy_n(static_cast<const R*>(p.soft) + row * p.head_dim, p.head_dim, s.row);
    m.delta[row] = dot(s.row, s.dout, p.depth);
    R* dv = target.dv + p.index[row] * p.depth;
    for (int64_t d = 0; d < p.depth; d += kLanes<R>)
      store<R>(hn::Add(load(dv + d), load(s.dout + d)), dv + d);
  }
}

// Queries [t0, t0 + rows) of head h over the keys of chunk c.
template <class R>
void differentiate(const Top1ElementBackward& call, const Problem<R>& p, const BackwardMemory<R>& m,
                   const BackwardScratch<R>& s, const Target<R>& target, int64_t h, int64_t c,
                   int64_t t0, int64_t rows) {
  const int64_t seen = p.past + t0 + 1 - c * p.C;
  const int64_t keys = std::min(p.keys(c), seen + rows - 1);
  const int64_t columns = padded<R>(keys);
  for (int64_t i = 0; i < rows; ++i) {
    read_scaled(p, p.q, target.b, t0 + i, h, R(p.scale * kLog2E), s.q + i * p.depth);
    read_scaled(p, call.dout, target.b, t0 + i, h, R(1), s.dout + i * p.depth);
  }
  matmul(rows, columns, p.head_dim, Left<R>{s.q, p.depth, 1},
         m.keys.at(p, target.b, target.kv_head, c), p.width, s.P, p.width, false);
  matmul(rows, columns, p.head_dim, Left<R>{s.dout, p.depth, 1},
         m.values.at(p, target.b, target.kv_head, c), p.width, s.dS, p.width, false);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t row = p.row(target.b, h, t0 + i);
    R* P = s.P + i * p.width;
    R* dS = s.dS + i * p.width;
    exponentials(P, std::min(keys, seen + i), keys,
                 R(static_cast<const R*>(p.logsumexp)[row] * R(kLog2E)));
    const Vec<R> delta = hn::Set(Lanes<R>(), m.delta[row]);
    for (int64_t j = 0; j < columns; j += kLanes<R>)
      store<R>(hn::Mul(load(P + j), hn::Sub(load(dS + j), delta)), dS + j);
  }
  R* dk = target.dk + c * p.C * p.depth;
  matmul(keys, p.depth, rows, Left<R>{s.dS, 1, p.width}, s.q, p.depth, dk, p.depth, true);
  R* dq = m.dq + p.row(target.b, h, t0) * p.depth;
  matmul(rows, p.depth, keys, Left<R>{s.dS, p.width, 1}, s.keys, p.depth, dq, p.depth, true);
}

template <class R>
void differentiate_head(const Top1ElementBackward& call, const Problem<R>& p,
                        const BackwardMemory<R>& m, const BackwardScratch<R>& s,
                        const Target<R>& target) {
  const auto [b, kv_head, dk, dv] = target;
  for (R* gradient : {dk, dv}) std::fill_n(gradient, p.size * p.depth, R(0));
  std::fill_n(m.dq + p.row(b, kv_head * p.group, 0) * p.depth, p.group * p.time * p.depth, R(0));
  for (int64_t h = kv_head * p.group; h < (kv_head + 1) * p.group; ++h)
    read_gradients(call, p, m, s, target, h);
  for (int64_t c = 0; c < p.chunks; ++c) {
    read_chunk(p, p.k, b, kv_head, c, s.keys);
    for (int64_t h = kv_head * p.group; h < (kv_head + 1) * p.group; ++h)
      for (int64_t t0 = p.first_query(c); t0 < p.time; t0 += kRows)
        differentiate(call, p, m, s, target, h, c, t0, std::min(kRows, p.time - t0));
  }
  for (int64_t h = kv_head * p.group; h < (kv_head + 1) * p.group; ++h)
    for (int64_t t = 0; t < p.time; ++t)
      write_scaled(p, call.dq, b, t, h, R(p.scale), m.dq + p.row(b, h, t) * p.depth);
  for (int64_t j = 0; j < p.size; ++j) {
    write_scaled(p, call.dk, b, j, kv_head, R(1 / kLog2E), dk + j * p.depth);
    write_scaled(p, call.dv, b, j, kv_head, R(1), dv + j * p.depth);
  }
}

template <class R>
void backward(const Top1ElementBackward& call, void* workspace, const ParallelFor& parallel) {
  const Problem<R> p(call.forward);
  WorkspaceArena carve(workspace);
  BackwardMemory<R> m(carve, p);
  const auto [memory, bytes] = m.scratch;
  pack_columns(p, p.k, m.keys, memory, bytes, parallel);
  pack_columns(p, p.v, m.values, memory, bytes, parallel);
  for_each(p.batch * p.kv_heads, memory, bytes, parallel, [&](int64_t i, std::byte* own) HWY_ATTR {
    WorkspaceArena scratch(own);
    const int64_t row = i * p.size * p.depth;
    differentiate_head(call, p, m, BackwardScratch<R>(scratch, p),
                       Target<R>{i / p.kv_heads, i % p.kv_heads, m.dk + row, m.dv + row});
  });
}

template <class R, template <class> class Memory>
size_t bytes_of(const Top1ElementForward& call) {
  WorkspaceArena count;
  Memory<R>(count, Problem<R>(call));
  return count.used();
}

size_t element_forward_bytes(const Top1ElementForward& p) {
  return p.dtype == DType::f64 ? bytes_of<double, ForwardMemory>(p)
                               : bytes_of<float, ForwardMemory>(p);
}
size_t element_backward_bytes(const Top1ElementBackward& bwd) {
  const Top1ElementForward& p = bwd.forward;
  return p.dtype == DType::f64 ? bytes_of<double, BackwardMemory>(p)
                               : bytes_of<float, BackwardMemory>(p);
}
void element_forward(const Top1ElementForward& p, void* workspace, const ParallelFor& parallel) {
  p.dtype == DType::f64 ? forward<double>(p, workspace, parallel)
                        : forward<float>(p, workspace, parallel);
}
void element_backward(const Top1ElementBackward& bwd, void* workspace,
                      const ParallelFor& parallel) {
  bwd.forward.dtype == DType::f64 ? backward<double>(bwd, workspace, parallel)
                                  : backward<float>(bwd, workspace, parallel);
}

}  // namespace
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace assay::ops::cpu {
HWY_EXPORT(element_forward_bytes);
HWY_EXPORT(element_backward_bytes);
size_t workspace_bytes(const Top1ElementForward& p) {
  return HWY_DYNAMIC_DISPATCH(element_forward_bytes)(p);
}
size_t workspace_bytes(const Top1ElementBackward& bwd) {
  return HWY_DYNAMIC_DISPATCH(element_backward_bytes)(bwd);
}
ASSAY_CPU_WORKSPACE_KERNEL(top1_element, element_forward, Top1ElementForward)
ASSAY_CPU_WORKSPACE_KERNEL(top1_element, element_backward, Top1ElementBackward)
}  // namespace assay::ops::cpu
#endif
