// Code shared by the forward and the backward of the recurrence on the CPU. Compiled once per
// Highway target. A task walks one head's state, or one tile of its columns, through time: lanes
// are columns, which never meet.
#if defined(ASSAY_OPS_MATRIX_RECURRENCE_CPU_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASSAY_OPS_MATRIX_RECURRENCE_CPU_INL_H_
#undef ASSAY_OPS_MATRIX_RECURRENCE_CPU_INL_H_
#else
#define ASSAY_OPS_MATRIX_RECURRENCE_CPU_INL_H_
#endif

#include "ops/cpu/simd-inl.h"
#include "ops/recurrence/matrix_recurrence/kernel.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {

using cpu::kStateChunk;
constexpr int64_t kWorkers = 64;  // or fewer tasks run in parallel; each has its own scratch

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
void read_bonus(const MatrixRecurrenceForward& p, const Tile& tile, Scratch<R>& s) {
  std::fill_n(s.u, padded_keys<R>(p), R(0));
  if (p.u) std::copy_n(static_cast<const R*>(p.u) + tile.head * p.key_dim, p.key_dim, s.u);
}

// Bytes of scratch of all workers.
template <class R>
size_t workers_bytes(const MatrixRecurrenceForward& p, bool backward) {
  const int64_t workers = std::min(p.batch * p.heads * tiles_per_head<R>(p), kWorkers);
  return workers * scratch_bytes<R>(p, backward);
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

}  // namespace
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
