// The recurrence on the CPU. A task walks one head's state, or one tile of its
// columns, through time: lanes are columns, which never meet, so the forward
// needs no sum over lanes; the backward gathers those of 16 rows (AVX-512) at
// a time.
#include "ops/recurrence/matrix_recurrence/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/recurrence/matrix_recurrence/cpu.cc"
#include "ops/cpu/highway.h"
//
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {
using cpu::kStateChunk;
constexpr int64_t kWorkers = 64;  // the most tasks that run at once, each with its scratch

struct Tile {
  // columns [first, first + width) of one head's state
  int64_t batch;
  int64_t head;
  int64_t index;
  int64_t first;
  int64_t width;
};

template <class R>
int64_t tiles_per_head(const MatrixRecurrenceForward& p) {
  return (p.value_dim + kTile<R> - 1) / kTile<R>;
}
template <class R>
Tile tile_at(const MatrixRecurrenceForward& p, int64_t i) {
  const int64_t tiles = tiles_per_head<R>(p);
  const int64_t index = i % tiles;
  const int64_t head = i / tiles;
  return {head / p.heads, head % p.heads, index, index * kTile<R>,
          std::min(kTile<R>, p.value_dim - index * kTile<R>)};
}
template <class R>
int64_t padded_keys(const MatrixRecurrenceForward& p) {
  return (p.key_dim + kLanes<R> - 1) / kLanes<R> * kLanes<R>;
}

enum Sum { kQ, kK, kA, kB, kDecay, kSums };  // sums of the backward over the columns

// Scratch of one worker. Key rows are [kStateChunk, Kp], value rows
// [kStateChunk, kTile], states [K, kTile]; what lies after K and after the
// tile's columns holds zeros. Names follow kernel.h.
template <class R>
struct Scratch {
  // key rows; u is one
  R* q;
  R* k;
  R* a;
  R* b;
  R* decay;
  R* u;
  // value rows
  R* v;
  R* c;
  R* e;
  R* out;
  // value rows: S_{t−1}ᵀ a_t and c_t + e_t ⊙ r_t
  R* r;
  R* w;
  R* state;
  // Backward only.
  R* dout;
  R* dv;
  R* dc;
  R* de;
  R* dstate;
  R* states;        // S before each step and after the last: [kStateChunk + 1, K,
                    // kTile]
  R* lanes[kSums];  // [Kp, lanes]: sums over columns that still are in their
                    // lanes
  R* rows[kSums];   // key rows: gradients of q, k, a, b, decay
  R* du;            // [Kp]

  Scratch(WorkspaceArena& carve, const MatrixRecurrenceForward& p, bool backward) {
    const int64_t keys = padded_keys<R>(p);
    const int64_t key_rows = kStateChunk * keys;
    const int64_t value_rows = kStateChunk * kTile<R>;
    for (R** x : {&q, &k, &a, &b, &decay}) *x = carve.take<R>(key_rows);
    for (R** x : {&v, &c, &e, &out, &r, &w}) *x = carve.take<R>(value_rows);
    u = carve.take<R>(keys);
    state = carve.take<R>(p.key_dim * kTile<R>);
    if (!backward) return;
    for (R** x : {&dout, &dv, &dc, &de}) *x = carve.take<R>(value_rows);
    dstate = carve.take<R>(p.key_dim * kTile<R>);
    states = carve.take<R>((kStateChunk + 1) * p.key_dim * kTile<R>);
    for (R*& x : lanes) x = carve.take<R>(keys * kLanes<R>);
    for (R*& x : rows) x = carve.take<R>(key_rows);
    du = carve.take<R>(keys);
  }
};
template <class R>
size_t scratch_bytes(const MatrixRecurrenceForward& p, bool backward) {
  WorkspaceArena count;
  Scratch<R>(count, p, backward);
  return count.used();
}

// The tile's columns of a state [K, V] in memory to [K, kTile] and back. No
// memory: zeros, or nothing is written.
template <class R>
void read_state(const R* from, const MatrixRecurrenceForward& p, const Tile& tile, R* to) {
  for (int64_t k = 0; k < p.key_dim; ++k, to += kTile<R>) {
    std::fill(to, to + kTile<R>, R(0));
    if (from) std::copy_n(from + k * p.value_dim + tile.first, tile.width, to);
  }
}
template <class R>
void write_state(const R* from, const MatrixRecurrenceForward& p, const Tile& tile, R* to) {
  if (!to) return;
  for (int64_t k = 0; k < p.key_dim; ++k)
    std::copy_n(from + k * kTile<R>, tile.width, to + k * p.value_dim + tile.first);
}
// The head's state in [B, blocks, H, K, V]; null stays null.
template <class R, class Void>
auto* state_at(Void* data, const MatrixRecurrenceForward& p, const Tile& tile, int64_t blocks = 1,
               int64_t block = 0) {
  using Real = std::conditional_t<std::is_const_v<Void>, const R, R>;
  const int64_t offset =
      (((tile.batch * blocks + block) * p.heads) + tile.head) * p.key_dim * p.value_dim;
  return data ? static_cast<Real*>(data) + offset : nullptr;
}

// `steps` rows of `n` of `dim` numbers, from column `first`, each padded with
// zeros to `padded`. Absent: `filler`.
template <class R>
void read_rows(const HeadView& x, const MatrixRecurrenceForward& p, const Tile& tile, int64_t t0,
               int64_t steps, int64_t dim, int64_t first, int64_t n, int64_t padded, R filler,
               R* to) {
  if (!x) return std::fill(to, to + steps * padded, filler);
  const int64_t head = tile.head / (p.heads / x.heads);
  for (int64_t i = 0; i < steps; ++i, to += padded) {
    const auto* row = reinterpret_cast<const R*>(
        element(x.rows, p.dtype, tile.batch, t0 + i, head * dim + first));
    std::copy_n(row, n, to);
    std::fill(to + n, to + padded, R(0));
  }
}
// Row (b, t, h) of a dense [B, T, H, dim].
template <class R>
R* dense_row(void* data, const MatrixRecurrenceForward& p, const Tile& tile, int64_t t,
             int64_t dim) {
  return static_cast<R*>(data) + ((tile.batch * p.time + t) * p.heads + tile.head) * dim;
}
template <class R>
void write_values(const R* from, void* to, const MatrixRecurrenceForward& p, const Tile& tile,
                  int64_t t0, int64_t steps) {
  if (!to) return;
  for (int64_t i = 0; i < steps; ++i)
    std::copy_n(from + i * kTile<R>, tile.width,
                dense_row<R>(to, p, tile, t0 + i, p.value_dim) + tile.first);
}

template <class R>
void read_chunk(const MatrixRecurrenceForward& p, const Tile& tile, int64_t t0, int64_t steps,
                Scratch<R>& s) {
  const int64_t K = p.key_dim;
  const int64_t Kp = padded_keys<R>(p);
  auto keys = [&](const HeadView& x, R* to) {
    read_rows(x, p, tile, t0, steps, K, 0, K, Kp, R(0), to);
  };
  auto values = [&](const HeadView& x, R filler, R* to) {
    read_rows(x, p, tile, t0, steps, p.value_dim, tile.first, tile.width, kTile<R>, filler, to);
  };
  keys(p.q, s.q);
  keys(p.k, s.k);
  values(p.v, R(0), s.v);
  if (p.transition != Transition::diagonal) {
    keys(p.a, s.a);
    keys(p.b, s.b);
    values(p.c, R(0), s.c);
    values(p.e, R(1), s.e);
  }
  if (p.decay_dim == K) return read_rows(p.decay, p, tile, t0, steps, K, 0, K, Kp, R(1), s.decay);
  for (int64_t i = 0; i < steps; ++i) {
    R decay = 1;
    read_rows(p.decay, p, tile, t0 + i, 1, 1, 0, 1, 1, R(1), &decay);
    std::fill_n(s.decay + i * Kp, Kp, decay);
  }
}

// Σ_i x_i y_i z_i over a padded key row.
template <class R>
R dot(const R* x, const R* y, const R* z, int64_t padded) {
  Vec<R> total = set<R>(0);
  for (int64_t i = 0; i < padded; i += kLanes<R>)
    total = hn::MulAdd(hn::Mul(load(x + i), load(y + i)), load(z + i), total);
  return sum<R>(total);
}

// The vectors of a tile's row that hold columns: 1, 2 or 4.
template <class R, int64_t kVectors>
struct Row {
  Vec<R> v[kVectors];
  HWY_INLINE explicit Row(const R* at) {
    for (int64_t i = 0; i < kVectors; ++i) v[i] = load(at + i * kLanes<R>);
  }
  HWY_INLINE void to(R* at) const {
    for (int64_t i = 0; i < kVectors; ++i) store<R>(v[i], at + i * kLanes<R>);
  }
};

// One step from the state `from` to the state `to` (which may be the same), and
// its output.
template <class R, int64_t kVectors, Transition kLow, bool kWrites, bool kBefore>
HWY_INLINE void forward_step(int64_t t, int64_t K, int64_t Kp, const R* from, R* to,
                             const Scratch<R>& s) {
  const R* q = s.q + t * Kp;
  const R* k = s.k + t * Kp;
  const R* a = s.a + t * Kp;
  const R* b = s.b + t * Kp;
  const R* decay = s.decay + t * Kp;
  const R* v = s.v + t * kTile<R>;
  const Row<R, kVectors> value(v);
  const Row<R, kVectors> e(kLow == Transition::diagonal ? v : s.e + t * kTile<R>);
  Row<R, kVectors> w(v);
  Row<R, kVectors> out(v);
  for (auto& x : out.v) x = set<R>(0);
  if constexpr (kLow == Transition::rank_one) {
    Row<R, kVectors> r(out);
    for (int64_t n = 0; n < K; ++n)
      for (int64_t j = 0; j < kVectors; ++j)
        r.v[j] = hn::MulAdd(set<R>(a[n]), load(from + n * kTile<R> + j * kLanes<R>), r.v[j]);
    const Row<R, kVectors> c(s.c + t * kTile<R>);
    for (int64_t j = 0; j < kVectors; ++j) w.v[j] = hn::MulAdd(e.v[j], r.v[j], c.v[j]);
    r.to(s.r + t * kTile<R>);
    w.to(s.w + t * kTile<R>);
  }
  for (int64_t n = 0; n < K; ++n) {
    const Vec<R> qn = set<R>(q[n]);
    const Vec<R> kn = set<R>(k[n]);
    const Vec<R> bn = set<R>(kLow == Transition::rank_one ? b[n] : R(0));
    const Vec<R> an = set<R>(kLow == Transition::elementwise ? a[n] : R(0));
    const Vec<R> dn = set<R>(decay[n]);
    for (int64_t j = 0; j < kVectors; ++j) {
      const Vec<R> before = load(from + n * kTile<R> + j * kLanes<R>);
      Vec<R> state =
          hn::Mul(before, kLow == Transition::elementwise ? hn::MulAdd(an, e.v[j], dn) : dn);
      if constexpr (kWrites) state = hn::MulAdd(kn, value.v[j], state);
      if constexpr (kLow == Transition::rank_one) state = hn::MulAdd(bn, w.v[j], state);
      store<R>(state, to + n * kTile<R> + j * kLanes<R>);
      out.v[j] = hn::MulAdd(qn, kBefore ? before : state, out.v[j]);
    }
  }
  if constexpr (kBefore) {
    const Vec<R> bonus = set<R>(dot(q, k, s.u, Kp));
    for (int64_t j = 0; j < kVectors; ++j) out.v[j] = hn::MulAdd(bonus, value.v[j], out.v[j]);
  }
  out.to(s.out + t * kTile<R>);
}

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

// body(vectors, low, writes, before), as constants, for the case of it that p
// and a tile of `width` columns are.
template <class R, class Body>
void for_case(const MatrixRecurrenceForward& p, int64_t width, const Body& body) {
  using std::false_type, std::integral_constant, std::true_type;
  auto with = [&](auto vectors) HWY_ATTR {
    if (p.transition == Transition::elementwise)
      body(vectors, integral_constant<Transition, Transition::elementwise>(), true_type(),
           false_type());
    else if (p.transition == Transition::rank_one && p.k)
      body(vectors, integral_constant<Transition, Transition::rank_one>(), true_type(),
           false_type());
    else if (p.transition == Transition::rank_one)
      body(vectors, integral_constant<Transition, Transition::rank_one>(), false_type(),
           false_type());
    else if (p.u)
      body(vectors, integral_constant<Transition, Transition::diagonal>(), true_type(),
           true_type());
    else
      body(vectors, integral_constant<Transition, Transition::diagonal>(), true_type(),
           false_type());
  };
  if (width <= kLanes<R>) return with(integral_constant<int64_t, 1>());
  if (width <= 2 * kLanes<R>) return with(integral_constant<int64_t, 2>());
  with(integral_constant<int64_t, kTileVectors>());
}

// kKeep: every state stays in s.states, which begins with the one before the
// chunk.
template <class R, bool kKeep>
HWY_NOINLINE void forward_chunk(const MatrixRecurrenceForward& p, int64_t width, int64_t steps,
                                const Scratch<R>& s) {
  const int64_t K = p.key_dim;
  const int64_t Kp = padded_keys<R>(p);
  const int64_t size = K * kTile<R>;
  for_case<R>(p, width, [&](auto vectors, auto low, auto writes, auto before) HWY_ATTR {
    for (int64_t t = 0; t < steps; ++t) {
      R* from = kKeep ? s.states + t * size : s.state;
      forward_step<R, vectors(), low(), writes(), before()>(t, K, Kp, from,
                                                            kKeep ? from + size : from, s);
    }
  });
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

template <class R>
void read_bonus(const MatrixRecurrenceForward& p, const Tile& tile, Scratch<R>& s) {
  std::fill_n(s.u, padded_keys<R>(p), R(0));
  if (p.u) std::copy_n(static_cast<const R*>(p.u) + tile.head * p.key_dim, p.key_dim, s.u);
}

template <class R>
void forward_tile(const MatrixRecurrenceForward& p, const Tile& tile, Scratch<R>& s) {
  const int64_t chunks = (p.time + kStateChunk - 1) / kStateChunk;
  read_bonus(p, tile, s);
  read_state(state_at<R>(p.initial_state, p, tile), p, tile, s.state);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t t0 = chunk * kStateChunk;
    const int64_t steps = std::min(kStateChunk, p.time - t0);
    write_state(s.state, p, tile, state_at<R>(p.chunk_states, p, tile, chunks, chunk));
    read_chunk(p, tile, t0, steps, s);
    forward_chunk<R, false>(p, tile.width, steps, s);
    write_values(s.out, p.out, p, tile, t0, steps);
  }
  write_state(s.state, p, tile, state_at<R>(p.final_state, p, tile));
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

template <class R, class Body>
void for_each_tile(const MatrixRecurrenceForward& p, bool backward, std::byte* scratch,
                   const ParallelFor& parallel, const Body& body) {
  const int64_t tiles = p.batch * p.heads * tiles_per_head<R>(p);
  const int64_t workers = std::min(tiles, kWorkers);
  parallel(workers, 1, [&](int64_t begin, int64_t end) HWY_ATTR {
    // no other worker begins at this address
    WorkspaceArena carve(scratch + begin * scratch_bytes<R>(p, backward));
    Scratch<R> s(carve, p, backward);
    for (int64_t i = begin * tiles / workers; i < end * tiles / workers; ++i)
      body(tile_at<R>(p, i), s);
  });
}

template <class R>
void forward(const MatrixRecurrenceForward& p, void* workspace, const ParallelFor& parallel) {
  for_each_tile<R>(p, false, static_cast<std::byte*>(workspace), parallel,
                   [&](const Tile& tile, Scratch<R>& s) HWY_ATTR { forward_tile(p, tile, s); });
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
size_t bytes(const MatrixRecurrenceForward& p, const MatrixRecurrenceBackward* bwd) {
  WorkspaceArena count;
  if (bwd) Partials<R>(count, *bwd);
  const int64_t workers = std::min(p.batch * p.heads * tiles_per_head<R>(p), kWorkers);
  return count.used() + workers * scratch_bytes<R>(p, bwd != nullptr);
}

size_t state_bytes(const MatrixRecurrenceForward& p, const MatrixRecurrenceBackward* bwd) {
  return p.dtype == DType::f64 ? bytes<double>(p, bwd) : bytes<float>(p, bwd);
}
void state_forward(const MatrixRecurrenceForward& p, void* workspace, const ParallelFor& parallel) {
  p.dtype == DType::f64 ? forward<double>(p, workspace, parallel)
                        : forward<float>(p, workspace, parallel);
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
HWY_EXPORT(state_bytes);
size_t workspace_bytes(const MatrixRecurrenceForward& p) {
  return HWY_DYNAMIC_DISPATCH(state_bytes)(p, nullptr);
}
size_t workspace_bytes(const MatrixRecurrenceBackward& bwd) {
  return HWY_DYNAMIC_DISPATCH(state_bytes)(bwd.forward, &bwd);
}
ASSAY_CPU_WORKSPACE_KERNEL(matrix_recurrence, state_forward, MatrixRecurrenceForward)
ASSAY_CPU_WORKSPACE_KERNEL(matrix_recurrence, state_backward, MatrixRecurrenceBackward)
}  // namespace assay::ops::cpu
#endif
