// The scan on the CPU. A task walks one tile of channels of one sequence through time; lanes are
// channels, so the recurrence needs no shuffles and the sum over the state is a plain sum of
// vectors. Each tile has its own partial sums over channels or sequences, which are added in a
// fixed order: the bits do not depend on threads.
#include "ops/recurrence/selective_scan/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/recurrence/selective_scan/cpu.cc"
#include "ops/cpu/highway.h"
//
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {  // other operators have tiles and scratch of their own
using cpu::kChunk;
constexpr double kLn2 = 0.693147180559945309;
constexpr int64_t kWorkers = 64;  // or fewer tasks run in parallel; each has its own scratch

struct Tile {
  // index: within the group; channels [first, first + width)
  int64_t batch;
  int64_t group;
  int64_t index;
  int64_t first;
  int64_t width;
};

template <class R>
int64_t tiles_per_group(const SelectiveScanForward& p) {
  return (p.channels / p.groups + kTile<R> - 1) / kTile<R>;
}
template <class R>
int64_t num_tiles(const SelectiveScanForward& p) {
  return p.batch * p.groups * tiles_per_group<R>(p);
}
template <class R>
Tile tile_at(const SelectiveScanForward& p, int64_t i) {
  const int64_t tiles = tiles_per_group<R>(p);
  const int64_t size = p.channels / p.groups;
  const int64_t index = i % tiles;
  const int64_t group = i / tiles % p.groups;
  const int64_t begin = index * kTile<R>;
  return {i / tiles / p.groups, group, index, group * size + begin,
          std::min(kTile<R>, size - begin)};
}

// Scratch of one worker. Rows are [kChunk, kTile], states [N, kTile]; lanes past the tile's
// channels hold harmless zeros. Names follow kernel.h.
template <class R>
struct Scratch {
  // rows: u_t, delta_t + bias, Δ_t, Δ_t u_t, z_t, S_t C_t
  R* u;
  R* step;
  R* delta;
  R* input;
  R* z;
  R* y;
  // [kChunk, N]
  R* B;
  R* C;
  // A · log₂e, S_t
  R* A;
  R* state;
  // [kTile]
  R* D;
  R* bias;
  // Backward only.
  R* dy;
  R* g;
  R* dinput;
  R* dexponent;
  // rows: dy_t, gradient of S_t C_t + D u_t, of Δ_t u_t, Σ_n gradient of Δ_t A · A
  R* out;
  // gradient of S_t as step t + 1 sees it; [N, kTile]
  R* dstate;
  R* dA;
  // [kTile]
  R* dD;
  R* dbias;
  // S_{t−1} [kChunk + 1, N, kTile] and exp(Δ_t A) [kChunk, N, kTile]
  R* states;
  R* decays;

  Scratch(WorkspaceArena& carve, int64_t N, bool backward) {
    for (R** rows : {&u, &step, &delta, &input, &z, &y}) *rows = carve.take<R>(kChunk * kTile<R>);
    for (R** rows : {&B, &C}) *rows = carve.take<R>(kChunk * N);
    for (R** matrix : {&A, &state}) *matrix = carve.take<R>(N * kTile<R>);
    for (R** row : {&D, &bias}) *row = carve.take<R>(kTile<R>);
    if (!backward) return;
    for (R** rows : {&dy, &g, &dinput, &dexponent, &out}) *rows = carve.take<R>(kChunk * kTile<R>);
    for (R** matrix : {&dstate, &dA}) *matrix = carve.take<R>(N * kTile<R>);
    for (R** row : {&dD, &dbias}) *row = carve.take<R>(kTile<R>);
    states = carve.take<R>((kChunk + 1) * N * kTile<R>);
    decays = carve.take<R>(kChunk * N * kTile<R>);
  }
};

template <class R>
size_t scratch_bytes(int64_t N, bool backward) {
  WorkspaceArena count;
  Scratch<R>(count, N, backward);
  return count.used();
}

// [width, N] in memory to [N, kTile] in scratch and back. No memory: zeros, or nothing is written.
template <class R>
void read_states(const R* from, const Tile& tile, int64_t N, R* to) {
  std::fill(to, to + N * kTile<R>, R(0));
  if (!from) return;
  for (int64_t d = 0; d < tile.width; ++d)
    for (int64_t n = 0; n < N; ++n) to[n * kTile<R> + d] = from[d * N + n];
}
template <class R>
void write_states(const R* from, const Tile& tile, int64_t N, R* to) {
  if (!to) return;
  for (int64_t d = 0; d < tile.width; ++d)
    for (int64_t n = 0; n < N; ++n) to[d * N + n] = from[n * kTile<R> + d];
}
template <class R>
void read_channels(const void* from, const Tile& tile, R* to) {
  std::fill(to, to + kTile<R>, R(0));
  if (from) std::copy_n(static_cast<const R*>(from) + tile.first, tile.width, to);
}
// Where the tile's part of a [B, blocks, Dm, N] array begins; null stays null.
template <class R, class Void>
auto* states_at(Void* data, const SelectiveScanForward& p, const Tile& tile, int64_t blocks = 1,
                int64_t block = 0) {
  using Real = std::conditional_t<std::is_const_v<Void>, const R, R>;
  const int64_t offset = ((tile.batch * blocks + block) * p.channels + tile.first) * p.state_size;
  return data ? static_cast<Real*>(data) + offset : nullptr;
}
template <class R>
void read_rows(const SelectiveScanForward& p, const View& view, const Tile& tile, int64_t t0,
               int64_t steps, R* rows) {
  if (!view) return;
  for (int64_t i = 0; i < steps; ++i) {
    const std::byte* row = element(view, p.dtype, tile.batch, t0 + i, tile.first);
    prefetch_row<0>(element(view, p.dtype, tile.batch, t0 + i + kRowsAhead, tile.first),
                    tile.width * sizeof(R));
    read_row(row, p.dtype, tile.width, kTile<R>, rows + i * kTile<R>);
  }
}
template <class R>
void write_rows(const SelectiveScanForward& p, const R* rows, const Tile& tile, int64_t t0,
                int64_t steps, const View& view) {
  for (int64_t i = 0; i < steps; ++i) {
    prefetch_row<1>(element(view, p.dtype, tile.batch, t0 + i + kRowsAhead, tile.first),
                    tile.width * sizeof(R));
    write_row(rows + i * kTile<R>, p.dtype, tile.width,
              element(view, p.dtype, tile.batch, t0 + i, tile.first));
  }
}

template <class R>
void read_parameters(const SelectiveScanForward& p, const Tile& tile, Scratch<R>& s) {
  read_states(static_cast<const R*>(p.A) + tile.first * p.state_size, tile, p.state_size, s.A);
  fill(s.A, p.state_size * kTile<R>,
       [&](int64_t i) HWY_ATTR { return hn::Mul(load(s.A + i), set<R>(kLog2E)); });
  read_channels(p.D, tile, s.D);
  read_channels(p.delta_bias, tile, s.bias);
}

template <class R>
void read_chunk(const SelectiveScanForward& p, const Tile& tile, int64_t t0, int64_t steps,
                Scratch<R>& s) {
  const int64_t N = p.state_size;
  const int64_t size = steps * kTile<R>;
  read_rows(p, p.u, tile, t0, steps, s.u);
  read_rows(p, p.delta, tile, t0, steps, s.step);
  read_rows(p, p.z, tile, t0, steps, s.z);
  for (int64_t i = 0; i < steps; ++i) {
    read_row(element(p.B, p.dtype, tile.batch, t0 + i, tile.group * N), p.dtype, N, N, s.B + i * N);
    read_row(element(p.C, p.dtype, tile.batch, t0 + i, tile.group * N), p.dtype, N, N, s.C + i * N);
  }
  fill(s.step, size,
       [&](int64_t i) HWY_ATTR { return hn::Add(load(s.step + i), load(s.bias + i % kTile<R>)); });
  fill(s.delta, size, [&](int64_t i) HWY_ATTR {
    return p.delta_softplus ? softplus(load(s.step + i)) : load(s.step + i);
  });
  fill(s.input, size,
       [&](int64_t i) HWY_ATTR { return hn::Mul(load(s.delta + i), load(s.u + i)); });
}

// S_t = exp(Δ_t A) S_{t−1} + Δ_t u_t B_t and y_t = S_t C_t through the chunk. kKeep: every state
// and decay is stored.
template <class R, bool kKeep>
HWY_NOINLINE void scan_chunk(int64_t steps, int64_t N, const Scratch<R>& s) {
  for (int64_t t = 0; t < steps; ++t) {
    Vec<R> delta[kTileVectors];
    Vec<R> input[kTileVectors];
    Vec<R> y[kTileVectors];
    for (int64_t v = 0; v < kTileVectors; ++v) {
      delta[v] = load(s.delta + t * kTile<R> + v * kLanes<R>);
      input[v] = load(s.input + t * kTile<R> + v * kLanes<R>);
      y[v] = set<R>(0);
    }
    R* from = kKeep ? s.states + t * N * kTile<R> : s.state;
    R* to = kKeep ? from + N * kTile<R> : s.state;
    R* decays = kKeep ? s.decays + t * N * kTile<R> : nullptr;
    for (int64_t n = 0; n < N; ++n) {
      const Vec<R> B = set<R>(s.B[t * N + n]);
      const Vec<R> C = set<R>(s.C[t * N + n]);
      for (int64_t v = 0; v < kTileVectors; ++v) {
        const int64_t i = n * kTile<R> + v * kLanes<R>;
        const Vec<R> decay = exp2(hn::Mul(delta[v], load(s.A + i)));
        const Vec<R> state = hn::MulAdd(decay, load(from + i), hn::Mul(input[v], B));
        store<R>(state, to + i);
        if constexpr (kKeep) store<R>(decay, decays + i);
        y[v] = hn::MulAdd(state, C, y[v]);
      }
    }
    for (int64_t v = 0; v < kTileVectors; ++v) store<R>(y[v], s.y + t * kTile<R> + v * kLanes<R>);
  }
}

// y_t = (S_t C_t + D u_t) silu(z_t), in place.
template <class R>
void finish_outputs(const SelectiveScanForward& p, int64_t steps, const Scratch<R>& s) {
  fill(s.y, steps * kTile<R>, [&](int64_t i) HWY_ATTR {
    const Vec<R> y = hn::MulAdd(load(s.D + i % kTile<R>), load(s.u + i), load(s.y + i));
    return p.z ? hn::Mul(y, silu(load(s.z + i))) : y;
  });
}

template <class R>
void forward_tile(const SelectiveScanForward& p, const Tile& tile, Scratch<R>& s) {
  const int64_t N = p.state_size;
  const int64_t chunks = (p.time + kChunk - 1) / kChunk;
  read_parameters(p, tile, s);
  read_states(states_at<R>(p.initial_state, p, tile), tile, N, s.state);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t t0 = chunk * kChunk;
    const int64_t steps = std::min(kChunk, p.time - t0);
    write_states(s.state, tile, N, states_at<R>(p.chunk_states, p, tile, chunks, chunk));
    read_chunk(p, tile, t0, steps, s);
    scan_chunk<R, false>(steps, N, s);
    finish_outputs(p, steps, s);
    write_rows(p, s.y, tile, t0, steps, p.y);
  }
  write_states(s.state, tile, N, states_at<R>(p.final_state, p, tile));
}

// Sums that one tile cannot finish alone, added up when all tiles are done.
template <class R>
struct Partials {
  // [B, Dm, N], [B, Dm], [B, Dm]: over sequences
  R* dA;
  R* dD;
  R* dbias;
  // [tiles of a group, B, T, G, N]: over tiles
  R* dB;
  R* dC;
  Partials(WorkspaceArena& carve, const SelectiveScanForward& p) {
    const int64_t rows = p.batch * p.channels;
    const int64_t BC = p.batch * p.time * p.groups * p.state_size;
    dA = carve.take<R>(rows * p.state_size);
    dD = carve.take<R>(rows);
    dbias = carve.take<R>(rows);
    dB = carve.take<R>(tiles_per_group<R>(p) * BC);
    dC = carve.take<R>(tiles_per_group<R>(p) * BC);
  }
};

// g = dy silu(z), dD += g u, dz = dy (S_t C_t + D u) silu'(z) into s.out.
template <class R>
HWY_NOINLINE void gate_gradient(const SelectiveScanForward& p, int64_t steps, const Scratch<R>& s) {
  fill(s.g, steps * kTile<R>, [&](int64_t i) HWY_ATTR {
    const Vec<R> dy = load(s.dy + i);
    const Vec<R> u = load(s.u + i);
    Vec<R> g = dy;
    if (p.z) {
      const Vec<R> z = load(s.z + i);
      const Vec<R> gate = sigmoid(z);
      const Vec<R> y = hn::MulAdd(load(s.D + i % kTile<R>), u, load(s.y + i));
      g = hn::Mul(dy, hn::Mul(z, gate));
      store<R>(hn::Mul(hn::Mul(dy, y), silu_slope(z, gate)), s.out + i);
    }
    R* dD = s.dD + i % kTile<R>;
    store<R>(hn::MulAdd(g, u, load(dD)), dD);
    return g;
  });
}

// dC_t = Σ_d g_t S_t, from the states that scan_chunk kept. `dC` has rows of N, `stride` apart.
template <class R>
HWY_NOINLINE void output_gradient(int64_t steps, int64_t N, const Scratch<R>& s, R* dC,
                                  int64_t stride) {
  for (int64_t t = 0; t < steps; ++t)
    for (int64_t n = 0; n < N; ++n) {
      Vec<R> total = set<R>(0);
      for (int64_t v = 0; v < kTileVectors; ++v)
        total = hn::MulAdd(load(s.g + t * kTile<R> + v * kLanes<R>),
                           load(s.states + ((t + 1) * N + n) * kTile<R> + v * kLanes<R>), total);
      dC[t * stride + n] = sum<R>(total);
    }
}

// The recurrence backwards: H_t = dL/dS_t = exp(Δ_{t+1} A) H_{t+1} + g_t C_t. README.md derives
// what follows from it.
template <class R>
HWY_NOINLINE void reverse_chunk(int64_t steps, int64_t N, const Scratch<R>& s, R* dB,
                                int64_t stride) {
  for (int64_t t = steps - 1; t >= 0; --t) {
    Vec<R> delta[kTileVectors];
    Vec<R> input[kTileVectors];
    Vec<R> g[kTileVectors];
    Vec<R> dinput[kTileVectors];
    Vec<R> dexponent[kTileVectors];
    for (int64_t v = 0; v < kTileVectors; ++v) {
      const int64_t i = t * kTile<R> + v * kLanes<R>;
      delta[v] = load(s.delta + i);
      input[v] = load(s.input + i);
      g[v] = load(s.g + i);
      dinput[v] = dexponent[v] = set<R>(0);
    }
    const R* states = s.states + t * N * kTile<R>;
    const R* decays = s.decays + t * N * kTile<R>;
    for (int64_t n = 0; n < N; ++n) {
      const Vec<R> B = set<R>(s.B[t * N + n]);
      const Vec<R> C = set<R>(s.C[t * N + n]);
      Vec<R> total = set<R>(0);
      for (int64_t v = 0; v < kTileVectors; ++v) {
        const int64_t i = n * kTile<R> + v * kLanes<R>;
        const Vec<R> dstate = hn::MulAdd(g[v], C, load(s.dstate + i));
        const Vec<R> before = hn::Mul(dstate, load(decays + i));
        const Vec<R> exponent = hn::Mul(before, load(states + i));
        total = hn::MulAdd(dstate, input[v], total);
        dinput[v] = hn::MulAdd(dstate, B, dinput[v]);
        dexponent[v] = hn::MulAdd(exponent, load(s.A + i), dexponent[v]);
        store<R>(hn::MulAdd(exponent, delta[v], load(s.dA + i)), s.dA + i);
        store<R>(before, s.dstate + i);
      }
      dB[t * stride + n] = sum<R>(total);
    }
    for (int64_t v = 0; v < kTileVectors; ++v) {
      store<R>(dinput[v], s.dinput + t * kTile<R> + v * kLanes<R>);
      store<R>(dexponent[v], s.dexponent + t * kTile<R> + v * kLanes<R>);
    }
  }
}

// du = Δ dinput + D g;  ddelta = (u dinput + dexponent) softplus'(delta + bias), which is also
//                       added to dbias.
template <class R>
void input_gradient(int64_t steps, const Scratch<R>& s) {
  fill(s.out, steps * kTile<R>, [&](int64_t i) HWY_ATTR {
    return hn::MulAdd(load(s.delta + i), load(s.dinput + i),
                      hn::Mul(load(s.D + i % kTile<R>), load(s.g + i)));
  });
}
template <class R>
void delta_gradient(const SelectiveScanForward& p, int64_t steps, const Scratch<R>& s) {
  fill(s.out, steps * kTile<R>, [&](int64_t i) HWY_ATTR {
    const Vec<R> exponent = hn::Mul(load(s.dexponent + i), set<R>(kLn2));  // A was scaled by log₂e
    const Vec<R> dstep = hn::MulAdd(load(s.u + i), load(s.dinput + i), exponent);
    const Vec<R> ddelta =
        p.delta_softplus ? hn::Mul(dstep, softplus_slope(load(s.step + i))) : dstep;
    R* dbias = s.dbias + i % kTile<R>;
    store<R>(hn::Add(ddelta, load(dbias)), dbias);
    return ddelta;
  });
}

template <class R>
void backward_chunk(const SelectiveScanBackward& bwd, const Tile& tile, int64_t chunk,
                    Scratch<R>& s, R* dB, R* dC) {
  const SelectiveScanForward& p = bwd.forward;
  const int64_t N = p.state_size;
  const int64_t chunks = (p.time + kChunk - 1) / kChunk;
  const int64_t stride = p.groups * N;
  const int64_t t0 = chunk * kChunk;
  const int64_t steps = std::min(kChunk, p.time - t0);
  read_chunk(p, tile, t0, steps, s);
  read_rows(p, bwd.dy, tile, t0, steps, s.dy);
  read_states(states_at<R>(static_cast<const void*>(p.chunk_states), p, tile, chunks, chunk), tile,
              N, s.states);
  scan_chunk<R, true>(steps, N, s);
  gate_gradient(p, steps, s);
  if (p.z) write_rows(p, s.out, tile, t0, steps, bwd.dz);
  output_gradient(steps, N, s, dC + t0 * stride, stride);
  reverse_chunk(steps, N, s, dB + t0 * stride, stride);
  input_gradient(steps, s);
  write_rows(p, s.out, tile, t0, steps, bwd.du);
  delta_gradient(p, steps, s);
  write_rows(p, s.out, tile, t0, steps, bwd.ddelta);
}

template <class R>
void backward_tile(const SelectiveScanBackward& bwd, const Tile& tile, Scratch<R>& s,
                   const Partials<R>& partials) {
  const SelectiveScanForward& p = bwd.forward;
  const int64_t N = p.state_size;
  const int64_t row = tile.batch * p.channels + tile.first;
  const int64_t BC = ((tile.index * p.batch + tile.batch) * p.time * p.groups + tile.group) * N;
  read_parameters(p, tile, s);
  read_states(states_at<R>(bwd.dfinal_state, p, tile), tile, N, s.dstate);
  std::fill(s.dA, s.dA + N * kTile<R>, R(0));
  std::fill(s.dD, s.dD + kTile<R>, R(0));
  std::fill(s.dbias, s.dbias + kTile<R>, R(0));
  for (int64_t chunk = (p.time - 1) / kChunk; chunk >= 0; --chunk)
    backward_chunk(bwd, tile, chunk, s, partials.dB + BC, partials.dC + BC);
  write_states(s.dstate, tile, N, states_at<R>(bwd.dinitial_state, p, tile));
  write_states(s.dA, tile, N, partials.dA + row * N);
  std::copy_n(s.dD, tile.width, partials.dD + row);
  std::copy_n(s.dbias, tile.width, partials.dbias + row);
}

template <class R, class Body>
void for_each_tile(const SelectiveScanForward& p, bool backward, std::byte* scratch,
                   const ParallelFor& parallel, const Body& body) {
  const int64_t tiles = num_tiles<R>(p);
  const int64_t workers = std::min(tiles, kWorkers);
  parallel(workers, 1, [&](int64_t begin, int64_t end) HWY_ATTR {
    // no other worker begins at this address
    WorkspaceArena carve(scratch + begin * scratch_bytes<R>(p.state_size, backward));
    Scratch<R> s(carve, p.state_size, backward);
    for (int64_t i = begin * tiles / workers; i < end * tiles / workers; ++i)
      body(tile_at<R>(p, i), s);
  });
}

template <class R>
void forward(const SelectiveScanForward& p, void* workspace, const ParallelFor& parallel) {
  for_each_tile<R>(p, false, static_cast<std::byte*>(workspace), parallel,
                   [&](const Tile& tile, Scratch<R>& s) HWY_ATTR { forward_tile(p, tile, s); });
}

template <class R>
void backward(const SelectiveScanBackward& bwd, void* workspace, const ParallelFor& parallel) {
  const SelectiveScanForward& p = bwd.forward;
  WorkspaceArena carve(workspace);
  const Partials<R> partials(carve, p);
  for_each_tile<R>(p, true, static_cast<std::byte*>(workspace) + carve.used(), parallel,
                   [&](const Tile& tile, Scratch<R>& s)
                       HWY_ATTR { backward_tile(bwd, tile, s, partials); });
  const int64_t BC = p.batch * p.time * p.groups * p.state_size;
  add_up(partials.dA, p.batch, p.channels * p.state_size, bwd.dA, parallel);
  add_up(partials.dD, p.batch, p.channels, bwd.dD, parallel);
  add_up(partials.dbias, p.batch, p.channels, bwd.ddelta_bias, parallel);
  add_up(partials.dB, tiles_per_group<R>(p), BC, bwd.dB, parallel);
  add_up(partials.dC, tiles_per_group<R>(p), BC, bwd.dC, parallel);
}

template <class R>
size_t bytes(const SelectiveScanForward& p, bool backward) {
  WorkspaceArena count;
  if (backward) Partials<R>(count, p);
  return count.used() +
         std::min(num_tiles<R>(p), kWorkers) * scratch_bytes<R>(p.state_size, backward);
}

size_t scan_bytes(const SelectiveScanForward& p, bool backward) {
  return p.dtype == DType::f64 ? bytes<double>(p, backward) : bytes<float>(p, backward);
}
void scan_forward(const SelectiveScanForward& p, void* workspace, const ParallelFor& parallel) {
  p.dtype == DType::f64 ? forward<double>(p, workspace, parallel)
                        : forward<float>(p, workspace, parallel);
}
void scan_backward(const SelectiveScanBackward& bwd, void* workspace, const ParallelFor& parallel) {
  bwd.forward.dtype == DType::f64 ? backward<double>(bwd, workspace, parallel)
                                  : backward<float>(bwd, workspace, parallel);
}

}  // namespace
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace assay::ops::cpu {
HWY_EXPORT(scan_bytes);
size_t workspace_bytes(const SelectiveScanForward& p) {
  return HWY_DYNAMIC_DISPATCH(scan_bytes)(p, false);
}
size_t workspace_bytes(const SelectiveScanBackward& bwd) {
  return HWY_DYNAMIC_DISPATCH(scan_bytes)(bwd.forward, true);
}
ASSAY_CPU_WORKSPACE_KERNEL(selective_scan, scan_forward, SelectiveScanForward)
ASSAY_CPU_WORKSPACE_KERNEL(selective_scan, scan_backward, SelectiveScanBackward)
}  // namespace assay::ops::cpu
#endif
