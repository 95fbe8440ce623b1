// The backward of the recurrence on the CPU. It gathers the sums over the lanes of 16 rows
// (AVX-512) at a time.
#include "ops/recurrence/matrix_recurrence/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/recurrence/matrix_recurrence/cpu_backward.cc"
#include "ops/cpu/highway.h"
//
#include "ops/recurrence/matrix_recurrence/cpu-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {

// Σ over the lanes of each of kCount rows, a sum a lane: pairs of neighbours
// are added until a row is one number.
template <class R, int64_t kCount>
HWY_INLINE Vec<R> merge_rows(const R* rows) {
  if constexpr (kCount == 1) {
    return load(rows);
  } else {
    const Vec<R> low = merge_rows<R, kCount / 2>(rows);
    const Vec<R> high = merge_rows<R, kCount / 2>(rows + kCount / 2 * kLanes<R>);
    return hn::Add(hn::ConcatEven(Lanes<R>(), high, low), hn::ConcatOdd(Lanes<R>(), high, low));
  }
}
template <class R>
HWY_INLINE void sum_lanes(const R* lanes, int64_t Kp, R* sums) {
  for (int64_t n = 0; n < Kp; n += kLanes<R>)
    store<R>(merge_rows<R, kLanes<R>>(lanes + n * kLanes<R>), sums + n);
}

// The step backwards: dstate is dL/dS_t as later steps see it and becomes
// dL/dS_{t−1}. README.md derives it.
template <class R, int64_t kVectors, Transition kLow, bool kWrites, bool kBefore>
HWY_INLINE void backward_step(int64_t t, int64_t K, int64_t Kp, const Scratch<R>& s) {
  const R* q = s.q + t * Kp;
  const R* k = s.k + t * Kp;
  const R* a = s.a + t * Kp;
  const R* b = s.b + t * Kp;
  const R* decay = s.decay + t * Kp;
  const R* before = s.states + t * K * kTile<R>;
  const R* after = before + K * kTile<R>;
  const int64_t row = t * kTile<R>;
  const Row<R, kVectors> dout(s.dout + row);
  const Row<R, kVectors> v(s.v + row);
  const Row<R, kVectors> w(kLow == Transition::rank_one ? s.w + row : s.v + row);
  const Row<R, kVectors> e(kLow == Transition::diagonal ? s.v + row : s.e + row);
  // dw: of c + e ⊙ r, or of e when diagonal
  Row<R, kVectors> dv(s.v + row);
  Row<R, kVectors> dw(s.v + row);
  for (auto& x : dv.v) x = set<R>(0);
  for (auto& x : dw.v) x = set<R>(0);
  for (int64_t n = 0; n < K; ++n) {
    const Vec<R> qn = set<R>(q[n]);
    const Vec<R> kn = set<R>(k[n]);
    const Vec<R> bn = set<R>(kLow == Transition::rank_one ? b[n] : R(0));
    const Vec<R> an = set<R>(kLow == Transition::elementwise ? a[n] : R(0));
    const Vec<R> dn = set<R>(decay[n]);
    Vec<R> dq = set<R>(0);
    Vec<R> dk = dq;
    Vec<R> db = dq;
    Vec<R> da = dq;
    Vec<R> ddecay = dq;
    for (int64_t j = 0; j < kVectors; ++j) {
      const int64_t i = n * kTile<R> + j * kLanes<R>;
      const Vec<R> old = load(before + i);
      const Vec<R> read = kBefore ? old : load(after + i);
      Vec<R> d = load(s.dstate + i);
      dq = hn::MulAdd(read, dout.v[j], dq);
      if constexpr (!kBefore) d = hn::MulAdd(qn, dout.v[j], d);
      if constexpr (kWrites) {
        dk = hn::MulAdd(d, v.v[j], dk);
        dv.v[j] = hn::MulAdd(kn, d, dv.v[j]);
      }
      const Vec<R> turned = hn::Mul(d, old);
      ddecay = hn::Add(turned, ddecay);
      if constexpr (kLow == Transition::rank_one) {
        db = hn::MulAdd(d, w.v[j], db);
        dw.v[j] = hn::MulAdd(bn, d, dw.v[j]);
      }
      if constexpr (kLow == Transition::elementwise) {
        da = hn::MulAdd(turned, e.v[j], da);
        dw.v[j] = hn::MulAdd(an, turned, dw.v[j]);
        d = hn::Mul(d, hn::MulAdd(an, e.v[j], dn));
      } else {
        d = hn::Mul(d, dn);
      }
      if constexpr (kBefore) d = hn::MulAdd(qn, dout.v[j], d);
      store<R>(d, s.dstate + i);
    }
    const int64_t i = n * kLanes<R>;
    store<R>(dq, s.lanes[kQ] + i);
    store<R>(ddecay, s.lanes[kDecay] + i);
    if constexpr (kWrites) store<R>(dk, s.lanes[kK] + i);
    if constexpr (kLow == Transition::rank_one) store<R>(db, s.lanes[kB] + i);
    if constexpr (kLow == Transition::elementwise) store<R>(da, s.lanes[kA] + i);
  }
  if constexpr (kLow == Transition::rank_one) {
    const Row<R, kVectors> r(s.r + row);
    Row<R, kVectors> dr(s.v + row);
    Row<R, kVectors> de(s.v + row);
    for (int64_t j = 0; j < kVectors; ++j) {
      dr.v[j] = hn::Mul(dw.v[j], e.v[j]);
      de.v[j] = hn::Mul(dw.v[j], r.v[j]);
    }
    for (int64_t n = 0; n < K; ++n) {
      Vec<R> da = set<R>(0);
      for (int64_t j = 0; j < kVectors; ++j) {
        const int64_t i = n * kTile<R> + j * kLanes<R>;
        da = hn::MulAdd(load(before + i), dr.v[j], da);
        store<R>(hn::MulAdd(set<R>(a[n]), dr.v[j], load(s.dstate + i)), s.dstate + i);
      }
      store<R>(da, s.lanes[kA] + n * kLanes<R>);
    }
    dw.to(s.dc + row);
    de.to(s.de + row);
  } else if constexpr (kLow == Transition::elementwise) {
    dw.to(s.de + row);
  }
  sum_lanes(s.lanes[kQ], Kp, s.rows[kQ] + t * Kp);
  sum_lanes(s.lanes[kDecay], Kp, s.rows[kDecay] + t * Kp);
  if constexpr (kWrites) sum_lanes(s.lanes[kK], Kp, s.rows[kK] + t * Kp);
  if constexpr (kLow != Transition::diagonal) sum_lanes(s.lanes[kA], Kp, s.rows[kA] + t * Kp);
  if constexpr (kLow == Transition::rank_one) sum_lanes(s.lanes[kB], Kp, s.rows[kB] + t * Kp);
  if constexpr (kBefore) {  // the term (Σ_n q_n u_n k_n) v
    const Vec<R> bonus = set<R>(dot(q, k, s.u, Kp));
    Vec<R> total = set<R>(0);
    for (int64_t j = 0; j < kVectors; ++j) {
      total = hn::MulAdd(dout.v[j], v.v[j], total);
      dv.v[j] = hn::MulAdd(bonus, dout.v[j], dv.v[j]);
    }
    const Vec<R> dbonus = set<R>(sum<R>(total));
    for (int64_t n = 0; n < Kp; n += kLanes<R>) {
      const Vec<R> qn = load(q + n);
      const Vec<R> kn = load(k + n);
      const Vec<R> un = hn::Mul(load(s.u + n), dbonus);
      R* dq = s.rows[kQ] + t * Kp + n;
      R* dk = s.rows[kK] + t * Kp + n;
      store<R>(hn::MulAdd(un, kn, load(dq)), dq);
      store<R>(hn::MulAdd(un, qn, load(dk)), dk);
      store<R>(hn::MulAdd(hn::Mul(qn, kn), dbonus, load(s.du + n)), s.du + n);
    }
  }
  if constexpr (kWrites) dv.to(s.dv + row);
}

template <class R>
HWY_NOINLINE void backward_chunk(const MatrixRecurrenceForward& p, int64_t width, int64_t steps,
                                 const Scratch<R>& s) {
  const int64_t K = p.key_dim;
  const int64_t Kp = padded_keys<R>(p);
  for_case<R>(p, width, [&](auto vectors, auto low, auto writes, auto before) HWY_ATTR {
    for (int64_t t = steps - 1; t >= 0; --t)
      backward_step<R, vectors(), low(), writes(), before()>(t, K, Kp, s);
  });
}

// Where the tiles of a head put what is summed over its columns: the output
// itself when there is only one tile.
template <class R>
struct Partials {
  void* sums[kSums] = {};  // [tiles, B, T, H, dim]
  R* du;                   // [tiles · B, H, K]
  Partials(WorkspaceArena& carve, const MatrixRecurrenceBackward& bwd) {
    const MatrixRecurrenceForward& p = bwd.forward;
    const int64_t tiles = tiles_per_head<R>(p);
    const int64_t rows = p.batch * p.time * p.heads;
    void* const outputs[] = {bwd.dq, bwd.dk, bwd.da, bwd.db, bwd.ddecay};
    for (int i = 0; i < kSums; ++i)
      sums[i] = !outputs[i] || tiles == 1 ? outputs[i] : carve.take<R>(tiles * rows * dim(p, i));
    du = carve.take<R>(tiles * p.batch * p.heads * p.key_dim);
  }
  static int64_t dim(const MatrixRecurrenceForward& p, int which) {
    return which == kDecay ? p.decay_dim : p.key_dim;
  }
};

template <class R>
void write_sums(const MatrixRecurrenceForward& p, const Tile& tile, int64_t t0, int64_t steps,
                const Scratch<R>& s, const Partials<R>& partials) {
  const int64_t rows = p.batch * p.time * p.heads;
  const int64_t Kp = padded_keys<R>(p);
  for (int i = 0; i < kSums; ++i) {
    if (!partials.sums[i]) continue;
    const int64_t dim = Partials<R>::dim(p, i);
    void* to = static_cast<R*>(partials.sums[i]) + tile.index * rows * dim;
    for (int64_t t = 0; t < steps; ++t) {
      const R* from = s.rows[i] + t * Kp;
      R* row = dense_row<R>(to, p, tile, t0 + t, dim);
      if (dim == p.key_dim) {
        std::copy_n(from, dim, row);
      } else {
        *row = 0;
        for (int64_t n = 0; n < p.key_dim; ++n) *row += from[n];
      }
    }
  }
}

template <class R>
void backward_tile(const MatrixRecurrenceBackward& bwd, const Tile& tile, Scratch<R>& s,
                   const Partials<R>& partials) {
  const MatrixRecurrenceForward& p = bwd.forward;
  const int64_t chunks = (p.time + kStateChunk - 1) / kStateChunk;
  const int64_t Kp = padded_keys<R>(p);
  read_bonus(p, tile, s);
  read_state(state_at<R>(bwd.dfinal_state, p, tile), p, tile, s.dstate);
  for (R* x : s.lanes) std::fill_n(x, Kp * kLanes<R>, R(0));
  for (R* x : s.rows) std::fill_n(x, kStateChunk * Kp, R(0));
  std::fill_n(s.du, Kp, R(0));
  const HeadView dout{
      {const_cast<void*>(bwd.dout), p.time * p.heads * p.value_dim, p.heads * p.value_dim},
      p.heads};
  for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
    const int64_t t0 = chunk * kStateChunk;
    const int64_t steps = std::min(kStateChunk, p.time - t0);
    read_chunk(p, tile, t0, steps, s);
    read_rows(dout, p, tile, t0, steps, p.value_dim, tile.first, tile.width, kTile<R>, R(0),
              s.dout);
    read_state(state_at<R>(static_cast<const void*>(p.chunk_states), p, tile, chunks, chunk), p,
               tile, s.states);
    forward_chunk<R, true>(p, tile.width, steps, s);
    backward_chunk<R>(p, tile.width, steps, s);
    write_values(s.dv, bwd.dv, p, tile, t0, steps);
    write_values(s.dc, bwd.dc, p, tile, t0, steps);
    write_values(s.de, bwd.de, p, tile, t0, steps);
    write_sums(p, tile, t0, steps, s, partials);
  }
  write_state(s.dstate, p, tile, state_at<R>(bwd.dinitial_state, p, tile));
  std::copy_n(
      s.du, p.key_dim,
      partials.du + ((tile.index * p.batch + tile.batch) * p.heads + tile.head) * p.key_dim);
}

template <class R>
void backward(const MatrixRecurrenceBackward& bwd, void* workspace, const ParallelFor& parallel) {
  const MatrixRecurrenceForward& p = bwd.forward;
  WorkspaceArena carve(workspace);
  const Partials<R> partials(carve, bwd);
  for_each_tile<R>(p, true, static_cast<std::byte*>(workspace) + carve.used(), parallel,
                   [&](const Tile& tile, Scratch<R>& s)
                       HWY_ATTR { backward_tile(bwd, tile, s, partials); });
  const int64_t tiles = tiles_per_head<R>(p);
  const int64_t rows = p.batch * p.time * p.heads;
  void* const outputs[] = {bwd.dq, bwd.dk, bwd.da, bwd.db, bwd.ddecay};
  for (int i = 0; i < kSums && tiles > 1; ++i)
    if (outputs[i])
      add_up(static_cast<const R*>(partials.sums[i]), tiles, rows * Partials<R>::dim(p, i),
             outputs[i], parallel);
  add_up(partials.du, tiles * p.batch, p.heads * p.key_dim, bwd.du, parallel);
}

template <class R>
size_t bytes(const MatrixRecurrenceBackward& bwd) {
  WorkspaceArena count;
  Partials<R>(count, bwd);
  return count.used() + workers_bytes<R>(bwd.forward, true);
}

size_t state_backward_bytes(const MatrixRecurrenceBackward& bwd) {
  return bwd.forward.dtype == DType::f64 ? bytes<double>(bwd) : bytes<float>(bwd);
}
void state_backward(const MatrixRecurrenceBackward& bwd, void* workspace,
                    const ParallelFor& parallel) {
  bwd.forward.dtype == DType::f64 ? backward<double>(bwd, workspace, parallel)
                                  : backward<float>(bwd, workspace, parallel);
}

}  // namespace
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace assay::ops::cpu {
HWY_EXPORT(state_backward_bytes);
size_t workspace_bytes(const MatrixRecurrenceBackward& bwd) {
  return HWY_DYNAMIC_DISPATCH(state_backward_bytes)(bwd);
}
ASSAY_CPU_WORKSPACE_KERNEL(matrix_recurrence, state_backward, MatrixRecurrenceBackward)
}  // namespace assay::ops::cpu
#endif
