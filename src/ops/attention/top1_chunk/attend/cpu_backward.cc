// The backward of top-1 chunk attention on the CPU: the passes of the forward again,
// from its logsumexp.
//   1. keys and values of each chunk as columns; δ_t = dout_t · out_t
//   2. queries sorted by the chunk they chose
//   3. for each slot, one task per chunk and key head: the queries that chose it add to its dk, dv
//      and to their own dq
//   4. one task per chunk and key head: its own queries; dk, dv and dq are finished
// A query has one chunk a slot and a chunk one task, so no row has two writers. Query heads that
// share a key head are taken in turn.
#include "ops/attention/top1_chunk/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/attention/top1_chunk/attend/cpu_backward.cc"
#include "ops/cpu/highway.h"
//
#include "ops/attention/top1_chunk/cpu-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {

template <class R>
struct Scratch {
  // [kRows, depth]
  R* q;
  R* dout;
  R* dq;
  // [kRows, width]
  R* P;
  R* dS;
  R* keys;  // [C, depth]
  Scratch(WorkspaceArena& carve, const Problem<R>& p)
      : q(carve.take<R>(kRows * p.depth)),
        dout(carve.take<R>(kRows * p.depth)),
        dq(carve.take<R>(kRows * p.depth)),
        P(carve.take<R>(kRows * p.width)),
        dS(carve.take<R>(kRows * p.width)),
        keys(carve.take<R>(p.C * p.depth)) {}
};

// dq lacks its factor s, dk its factor ln 2: it is summed from queries that were read times
// s · log₂e.
template <class R>
struct Memory {
  Columns<R> keys;
  Columns<R> values;
  Lists<R> lists;
  // [B, H, T], [B, H, T, depth]
  R* delta;
  R* dq;
  // [B, Hk, chunks · C, depth]
  R* dk;
  R* dv;
  std::byte* scratch;
  size_t scratch_bytes;
  Memory(WorkspaceArena& carve, const Problem<R>& p)
      : keys(carve, p),
        values(carve, p),
        lists(carve, p),
        delta(carve.take<R>(p.batch * p.heads * p.time)),
        dq(carve.take<R>(p.batch * p.heads * p.time * p.depth)),
        dk(carve.take<R>(p.batch * p.kv_heads * p.chunks * p.C * p.depth)),
        dv(carve.take<R>(p.batch * p.kv_heads * p.chunks * p.C * p.depth)) {
    WorkspaceArena count;
    Scratch<R>(count, p);
    scratch_bytes = count.used();
    scratch =
        carve.take<std::byte>(std::min(kWorkers, p.batch * p.heads * p.chunks) * scratch_bytes);
  }
};

// The work of a task: the keys and values of one chunk and key head, and their gradients so far.
template <class R>
struct Target {
  int64_t b;
  int64_t kv_head;
  int64_t chunk;
  // columns
  const R* keys;
  const R* values;
  // [C, depth]
  R* dk;
  R* dv;
};

template <class R>
void prepare_queries(const Top1ChunkBackward& call, const Problem<R>& p, const Memory<R>& m,
                     const ParallelFor& parallel) {
  parallel(p.batch * p.heads * p.time, 1024, [&](int64_t begin, int64_t end) HWY_ATTR {
    std::fill(m.dq + begin * p.depth, m.dq + end * p.depth, R(0));
  });
  for_each(p.batch * p.heads * p.chunks, m.scratch, m.scratch_bytes, parallel,
           [&](int64_t i, std::byte* memory) HWY_ATTR {
             WorkspaceArena carve(memory);
             const Scratch<R> s(carve, p);
             const int64_t chunk = i % p.chunks;
             const int64_t h = i / p.chunks % p.heads;
             const int64_t b = i / p.chunks / p.heads;
             for (int64_t t = p.first_query(chunk); t < p.last_query(chunk); ++t) {
               read_scaled(p, p.out, b, t, h, R(1), s.q);
               read_scaled(p, call.dout, b, t, h, R(1), s.dout);
               m.delta[p.row(b, h, t)] = dot(s.q, s.dout, p.depth);
             }
           });
}

// `rows` queries, s.q and s.dout, over the first limit(i) of `count` keys: adds to dk, dv
// and to s.dq.
template <class R, class Index, class Limit>
void differentiate(const Problem<R>& p, const Memory<R>& m, const Scratch<R>& s,
                   const Target<R>& target, int64_t rows, int64_t count, const Index& index,
                   const Limit& limit) {
  const int64_t columns = padded<R>(count);
  matmul(rows, columns, p.head_dim, Left<R>{s.q, p.depth, 1}, target.keys, p.width, s.P, p.width,
         false);
  matmul(rows, columns, p.head_dim, Left<R>{s.dout, p.depth, 1}, target.values, p.width, s.dS,
         p.width, false);
  for (int64_t i = 0; i < rows; ++i) {
    R* P = s.P + i * p.width;
    R* dS = s.dS + i * p.width;
    exponentials(P, limit(i), count, R(static_cast<const R*>(p.logsumexp)[index(i)] * R(kLog2E)));
    const Vec<R> delta = hn::Set(Lanes<R>(), m.delta[index(i)]);
    for (int64_t j = 0; j < columns; j += kLanes<R>)
      store<R>(hn::Mul(load(P + j), hn::Sub(load(dS + j), delta)), dS + j);
  }
  matmul(count, p.depth, rows, Left<R>{s.P, 1, p.width}, s.dout, p.depth, target.dv, p.depth, true);
  matmul(count, p.depth, rows, Left<R>{s.dS, 1, p.width}, s.q, p.depth, target.dk, p.depth, true);
  matmul(rows, p.depth, count, Left<R>{s.dS, p.width, 1}, s.keys, p.depth, s.dq, p.depth, true);
}

template <class R>
void read_query(const Top1ChunkBackward& call, const Problem<R>& p, const Memory<R>& m,
                const Scratch<R>& s, int64_t b, int64_t t, int64_t h, int64_t i) {
  read_scaled(p, p.q, b, t, h, R(p.scale * kLog2E), s.q + i * p.depth);
  read_scaled(p, call.dout, b, t, h, R(1), s.dout + i * p.depth);
  std::copy_n(m.dq + p.row(b, h, t) * p.depth, p.depth, s.dq + i * p.depth);
}

template <class R>
void remote_pass(const Top1ChunkBackward& call, const Problem<R>& p, const Memory<R>& m,
                 const Scratch<R>& s, const Target<R>& target, int64_t slot) {
  read_chunk(p, p.k, target.b, target.kv_head, target.chunk, s.keys);
  for (int64_t h = target.kv_head * p.group; h < (target.kv_head + 1) * p.group; ++h) {
    const auto [begin, end] = m.lists.of(p, target.b, h, slot, target.chunk);
    for (const int32_t* at = begin; at < end; at += kRows) {
      const int64_t rows = std::min<int64_t>(kRows, end - at);
      for (int64_t i = 0; i < rows; ++i) read_query(call, p, m, s, target.b, at[i], h, i);
      auto index = [&](int64_t i) { return p.row(target.b, h, at[i]); };
      differentiate(p, m, s, target, rows, p.C, index, [&](int64_t) { return p.C; });
      for (int64_t i = 0; i < rows; ++i)
        std::copy_n(s.dq + i * p.depth, p.depth, m.dq + index(i) * p.depth);
    }
  }
}

template <class R>
void local_pass(const Top1ChunkBackward& call, const Problem<R>& p, const Memory<R>& m,
                const Scratch<R>& s, const Target<R>& target) {
  const auto [b, kv_head, chunk, keys, values, dk, dv] = target;
  read_chunk(p, p.k, b, kv_head, chunk, s.keys);
  const int64_t begin = p.first_query(chunk);
  const int64_t end = p.last_query(chunk);
  for (int64_t h = kv_head * p.group; h < (kv_head + 1) * p.group; ++h)
    for (int64_t t0 = begin; t0 < end; t0 += kRows) {
      // by the first of them
      const int64_t rows = std::min(kRows, end - t0);
      const int64_t seen = p.past + t0 - chunk * p.C + 1;
      for (int64_t i = 0; i < rows; ++i) read_query(call, p, m, s, b, t0 + i, h, i);
      auto index = [&](int64_t i) { return p.row(b, h, t0 + i); };
      differentiate(p, m, s, target, rows, seen + rows - 1, index,
                    [&](int64_t i) { return seen + i; });
      for (int64_t i = 0; i < rows; ++i)
        write_scaled(p, call.dq, b, t0 + i, h, R(p.scale), s.dq + i * p.depth);
    }
  for (int64_t j = 0; j < p.keys(chunk); ++j) {
    write_scaled(p, call.dk, b, chunk * p.C + j, kv_head, R(1 / kLog2E), dk + j * p.depth);
    write_scaled(p, call.dv, b, chunk * p.C + j, kv_head, R(1), dv + j * p.depth);
  }
}

template <class R>
void backward(const Top1ChunkBackward& call, void* workspace, const ParallelFor& parallel) {
  const Problem<R> p(call.forward);
  WorkspaceArena carve(workspace);
  Memory<R> m(carve, p);
  pack_columns(p, p.k, m.keys, m.scratch, m.scratch_bytes, parallel);
  pack_columns(p, p.v, m.values, m.scratch, m.scratch_bytes, parallel);
  prepare_queries(call, p, m, parallel);
  sort_queries(p, m.lists, parallel);
  auto pass = [&](int64_t chunks, const auto& body) {
    for_each(p.batch * p.kv_heads * chunks, m.scratch, m.scratch_bytes, parallel,
             [&](int64_t i, std::byte* memory) HWY_ATTR {
               WorkspaceArena scratch(memory);
               const int64_t chunk = i % chunks;
               const int64_t h = i / chunks % p.kv_heads;
               const int64_t b = i / chunks / p.kv_heads;
               const int64_t rows = ((b * p.kv_heads + h) * p.chunks + chunk) * p.C * p.depth;
               body(Scratch<R>(scratch, p),
                    Target<R>{b, h, chunk, m.keys.at(p, b, h, chunk), m.values.at(p, b, h, chunk),
                              m.dk + rows, m.dv + rows});
             });
  };
  pass(p.chunks, [&](const Scratch<R>&, const Target<R>& target) {
    for (R* gradient : {target.dk, target.dv}) std::fill_n(gradient, p.C * p.depth, R(0));
  });
  for (int64_t slot = 0; slot < p.top_k; ++slot)
    pass(p.candidates, [&](const Scratch<R>& s, const Target<R>& target)
                           HWY_ATTR { remote_pass(call, p, m, s, target, slot); });
  pass(p.chunks, [&](const Scratch<R>& s, const Target<R>& target)
                     HWY_ATTR { local_pass(call, p, m, s, target); });
}

template <class R>
size_t bytes_of(const Top1ChunkBackward& call) {
  WorkspaceArena count;
  Memory<R>(count, Problem<R>(call.forward));
  return count.used();
}

size_t top1_chunk_backward_bytes(const Top1ChunkBackward& bwd) {
  return bwd.forward.dtype == DType::f64 ? bytes_of<double>(bwd) : bytes_of<float>(bwd);
}
void top1_chunk_run_backward(const Top1ChunkBackward& bwd, void* workspace,
                             const ParallelFor& parallel) {
  bwd.forward.dtype == DType::f64 ? backward<double>(bwd, workspace, parallel)
                                  : backward<float>(bwd, workspace, parallel);
}

}  // namespace
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace assay::ops::cpu {
HWY_EXPORT(top1_chunk_backward_bytes);
size_t workspace_bytes(const Top1ChunkBackward& bwd) {
  return HWY_DYNAMIC_DISPATCH(top1_chunk_backward_bytes)(bwd);
}
ASSAY_CPU_WORKSPACE_KERNEL(top1_chunk, top1_chunk_run_backward, Top1ChunkBackward)
}  // namespace assay::ops::cpu
#endif
