// The causal convolution on the CPU. A task walks one tile of channels of one sequence through time
// in blocks that stay in the L1 cache; lanes are channels. With xe = [initial_state; x], which
// is K − 1 steps longer than the sequence:
//   pre_t = bias + Σ_j w_j xe_{t+j}
//   dxe_i = Σ_j w_j dpre_{i−j} + dfinal_state_{i−T}     dw_j = Σ_t dpre_t xe_{t+j}
#include "ops/recurrence/causal_conv1d/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/recurrence/causal_conv1d/cpu.cc"
#include "ops/cpu/highway.h"
//
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
// other operators have tiles and scratch of their own
namespace {
// steps at a time; the widest kernel
constexpr int64_t kBlock = 32;
constexpr int64_t kMaxWidth = 32;

struct Tile {
  // channels [first, first + width)
  int64_t batch;
  int64_t first;
  int64_t width;
};
template <class R>
int64_t num_tiles(const CausalConv1dForward& p) {
  return p.batch * ((p.channels + kTile<R> - 1) / kTile<R>);
}
template <class R>
Tile tile_at(const CausalConv1dForward& p, int64_t i) {
  const int64_t tiles = (p.channels + kTile<R> - 1) / kTile<R>;
  const int64_t first = i % tiles * kTile<R>;
  return {i / tiles, first, std::min(kTile<R>, p.channels - first)};
}

// Rows of kTile numbers; lanes past the tile's channels hold zeros.
template <class R>
struct Scratch {
  // the block's inputs and the K − 1 before them
  alignas(64) R xe[(kMaxWidth - 1 + kBlock) * kTile<R>];
  // gradients of pre, and the K − 1 before them
  alignas(64) R dpre[(kMaxWidth - 1 + kBlock) * kTile<R>];
  alignas(64) R out[kBlock * kTile<R>];
  alignas(64) R weight[kMaxWidth * kTile<R>];
  alignas(64) R dweight[kMaxWidth * kTile<R>];
  alignas(64) R bias[kTile<R>];
  alignas(64) R dbias[kTile<R>];
  alignas(64) R row[kTile<R>];
};

// [Dm, columns] in memory to [columns, kTile] in scratch, and back.
template <class R>
void read_columns(const R* from, const Tile& tile, int64_t columns, R* to) {
  std::fill(to, to + columns * kTile<R>, R(0));
  if (!from) return;
  for (int64_t d = 0; d < tile.width; ++d)
    for (int64_t j = 0; j < columns; ++j) to[j * kTile<R> + d] = from[d * columns + j];
}
template <class R>
void write_column(const R* row, const Tile& tile, int64_t columns, int64_t j, R* to) {
  if (!to) return;
  for (int64_t d = 0; d < tile.width; ++d) to[d * columns + j] = row[d];
}
// Where the tile's part of a [B, Dm, K − 1] state begins; null stays null.
template <class R, class Void>
auto* state_at(Void* data, const CausalConv1dForward& p, const Tile& tile) {
  using Real = std::conditional_t<std::is_const_v<Void>, const R, R>;
  const int64_t offset = (tile.batch * p.channels + tile.first) * (p.width - 1);
  return data ? static_cast<Real*>(data) + offset : nullptr;
}
template <class R>
void read_rows(const CausalConv1dForward& p, const View& view, const Tile& tile, int64_t t0,
               int64_t steps, R* rows) {
  for (int64_t i = 0; i < steps; ++i) {
    const std::byte* row = element(view, p.dtype, tile.batch, t0 + i, tile.first);
    prefetch_row<0>(element(view, p.dtype, tile.batch, t0 + i + kRowsAhead, tile.first),
                    tile.width * sizeof(R));
    read_row(row, p.dtype, tile.width, kTile<R>, rows + i * kTile<R>);
  }
}

template <class R>
void read_parameters(const CausalConv1dForward& p, const Tile& tile, Scratch<R>& s) {
  read_columns(static_cast<const R*>(p.weight) + tile.first * p.width, tile, p.width, s.weight);
  std::fill(s.bias, s.bias + kTile<R>, R(0));
  if (p.bias) std::copy_n(static_cast<const R*>(p.bias) + tile.first, tile.width, s.bias);
  read_columns(state_at<R>(p.initial_state, p, tile), tile, p.width - 1, s.xe);
}

// The last K − 1 of `rows` + K − 1 rows become the first.
template <class R>
void keep_last(R* rows, int64_t steps, int64_t K) {
  std::copy(rows + steps * kTile<R>, rows + (steps + K - 1) * kTile<R>, rows);
}

// out_t = bias + Σ_j w_j xe_{t+j}
template <class R>
HWY_NOINLINE void convolve(int64_t steps, int64_t K, Scratch<R>& s) {
  for (int64_t v = 0; v < kTile<R>; v += kLanes<R>)
    for (int64_t t = 0; t < steps; ++t) {
      Vec<R> pre = load(s.bias + v);
      for (int64_t j = 0; j < K; ++j)
        pre =
            hn::MulAdd(load(s.weight + j * kTile<R> + v), load(s.xe + (t + j) * kTile<R> + v), pre);
      store<R>(pre, s.out + t * kTile<R> + v);
    }
}

template <class R>
void forward_tile(const CausalConv1dForward& p, const Tile& tile, Scratch<R>& s) {
  const int64_t K = p.width;
  read_parameters(p, tile, s);
  for (int64_t t0 = 0; t0 < p.time; t0 += kBlock) {
    const int64_t steps = std::min(kBlock, p.time - t0);
    read_rows(p, p.x, tile, t0, steps, s.xe + (K - 1) * kTile<R>);
    convolve(steps, K, s);
    if (p.silu)
      fill(s.out, steps * kTile<R>, [&](int64_t i) HWY_ATTR { return silu(load(s.out + i)); });
    for (int64_t i = 0; i < steps; ++i) {
      prefetch_row<1>(element(p.y, p.dtype, tile.batch, t0 + i + kRowsAhead, tile.first),
                      tile.width * sizeof(R));
      write_row(s.out + i * kTile<R>, p.dtype, tile.width,
                element(p.y, p.dtype, tile.batch, t0 + i, tile.first));
    }
    keep_last(s.xe, steps, K);
  }
  for (int64_t j = 0; j < K - 1; ++j)
    write_column(s.xe + j * kTile<R>, tile, K - 1, j, state_at<R>(p.final_state, p, tile));
}

// dw_j += Σ_t dpre_t xe_{t+j}, dbias += Σ_t dpre_t
template <class R>
HWY_NOINLINE void weight_gradient(int64_t steps, int64_t K, Scratch<R>& s) {
  const R* dpre = s.dpre + (K - 1) * kTile<R>;
  for (int64_t v = 0; v < kTile<R>; v += kLanes<R>) {
    for (int64_t j = 0; j < K; ++j) {
      Vec<R> total = load(s.dweight + j * kTile<R> + v);
      for (int64_t t = 0; t < steps; ++t)
        total =
            hn::MulAdd(load(dpre + t * kTile<R> + v), load(s.xe + (t + j) * kTile<R> + v), total);
      store<R>(total, s.dweight + j * kTile<R> + v);
    }
    Vec<R> total = load(s.dbias + v);
    for (int64_t t = 0; t < steps; ++t) total = hn::Add(load(dpre + t * kTile<R> + v), total);
    store<R>(total, s.dbias + v);
  }
}

// out_i = Σ_j w_j dpre_{i−j}
template <class R>
HWY_NOINLINE void correlate(int64_t steps, int64_t K, Scratch<R>& s) {
  for (int64_t v = 0; v < kTile<R>; v += kLanes<R>)
    for (int64_t i = 0; i < steps; ++i) {
      Vec<R> total = set<R>(0);
      for (int64_t j = 0; j < K; ++j)
        total = hn::MulAdd(load(s.weight + j * kTile<R> + v),
                           load(s.dpre + (K - 1 + i - j) * kTile<R> + v), total);
      store<R>(total, s.out + i * kTile<R> + v);
    }
}

// dxe_i for i in [i0, i0 + steps) goes where the input came from: initial_state, then x.
template <class R>
void write_input_gradient(const CausalConv1dBackward& bwd, const Tile& tile, int64_t i0,
                          int64_t steps, Scratch<R>& s) {
  const CausalConv1dForward& p = bwd.forward;
  const int64_t past = p.width - 1;
  const R* dfinal = state_at<R>(bwd.dfinal_state, p, tile);
  for (int64_t i = 0; i < steps; ++i) {
    R* row = s.out + i * kTile<R>;
    const int64_t at = i0 + i;
    for (int64_t d = 0; dfinal && at >= p.time && d < tile.width; ++d)
      row[d] += dfinal[d * past + at - p.time];
    if (at < past) write_column(row, tile, past, at, state_at<R>(bwd.dinitial_state, p, tile));
    else
      write_row(row, p.dtype, tile.width,
                element(bwd.dx, p.dtype, tile.batch, at - past, tile.first));
  }
}

// dpre_t = dy_t, times silu'(pre_t); s.out holds pre.
template <class R>
void pre_gradient(const CausalConv1dBackward& bwd, const Tile& tile, int64_t t0, int64_t steps,
                  Scratch<R>& s) {
  R* dpre = s.dpre + (bwd.forward.width - 1) * kTile<R>;
  read_rows(bwd.forward, bwd.dy[0], tile, t0, steps, dpre);
  if (bwd.forward.silu)
    fill(dpre, steps * kTile<R>, [&](int64_t i) HWY_ATTR {
      const Vec<R> pre = load(s.out + i);
      return hn::Mul(load(dpre + i), silu_slope(pre, sigmoid(pre)));
    });
}

template <class R>
void backward_tile(const CausalConv1dBackward& bwd, const Tile& tile, Scratch<R>& s, R* dweight,
                   R* dbias) {
  const CausalConv1dForward& p = bwd.forward;
  const int64_t K = p.width;
  read_parameters(p, tile, s);
  for (R* sums : {s.dpre, s.dweight}) std::fill(sums, sums + K * kTile<R>, R(0));
  std::fill(s.dbias, s.dbias + kTile<R>, R(0));
  for (int64_t t0 = 0; t0 < p.time; t0 += kBlock) {
    const int64_t steps = std::min(kBlock, p.time - t0);
    read_rows(p, p.x, tile, t0, steps, s.xe + (K - 1) * kTile<R>);
    convolve(steps, K, s);
    pre_gradient(bwd, tile, t0, steps, s);
    weight_gradient(steps, K, s);
    correlate(steps, K, s);
    write_input_gradient(bwd, tile, t0, steps, s);
    keep_last(s.xe, steps, K);
    keep_last(s.dpre, steps, K);
  }
  // no output follows the last step
  std::fill(s.dpre + (K - 1) * kTile<R>, s.dpre + 2 * (K - 1) * kTile<R>, R(0));
  correlate(K - 1, K, s);
  write_input_gradient(bwd, tile, p.time, K - 1, s);
  for (int64_t j = 0; j < K; ++j) write_column(s.dweight + j * kTile<R>, tile, K, j, dweight);
  std::copy_n(s.dbias, tile.width, dbias);
}

template <class R>
void forward(const CausalConv1dForward& p, const ParallelFor& parallel) {
  parallel(num_tiles<R>(p), 1, [&](int64_t begin, int64_t end) HWY_ATTR {
    Scratch<R> s;
    for (int64_t i = begin; i < end; ++i) forward_tile(p, tile_at<R>(p, i), s);
  });
}

// A sequence's own sums lie in the workspace, [B, Dm, K] and [B, Dm], and are added in order
// at the end.
template <class R>
void backward(const CausalConv1dBackward& bwd, void* workspace, const ParallelFor& parallel) {
  const CausalConv1dForward& p = bwd.forward;
  WorkspaceArena carve(workspace);
  R* dweight = carve.take<R>(p.batch * p.channels * p.width);
  R* dbias = carve.take<R>(p.batch * p.channels);
  parallel(num_tiles<R>(p), 1, [&](int64_t begin, int64_t end) HWY_ATTR {
    Scratch<R> s;
    for (int64_t i = begin; i < end; ++i) {
      const Tile tile = tile_at<R>(p, i);
      const int64_t row = tile.batch * p.channels + tile.first;
      backward_tile(bwd, tile, s, dweight + row * p.width, dbias + row);
    }
  });
  add_up(dweight, p.batch, p.channels * p.width, bwd.dweight, parallel);
  add_up(dbias, p.batch, p.channels, bwd.dbias, parallel);
}

size_t conv_bytes(const CausalConv1dBackward& bwd) {
  const CausalConv1dForward& p = bwd.forward;
  WorkspaceArena count;
  for (const int64_t columns : {p.width, int64_t{1}})
    p.dtype == DType::f64 ? (void)count.take<double>(p.batch * p.channels * columns)
                          : (void)count.take<float>(p.batch * p.channels * columns);
  return count.used();
}
void convolve_forward(const CausalConv1dForward& p, const ParallelFor& parallel) {
  p.dtype == DType::f64 ? forward<double>(p, parallel) : forward<float>(p, parallel);
}
void convolve_backward(const CausalConv1dBackward& bwd, void* workspace,
                       const ParallelFor& parallel) {
  bwd.forward.dtype == DType::f64 ? backward<double>(bwd, workspace, parallel)
                                  : backward<float>(bwd, workspace, parallel);
}

}  // namespace
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace assay::ops::cpu {
HWY_EXPORT(conv_bytes);
size_t workspace_bytes(const CausalConv1dBackward& bwd) {
  return HWY_DYNAMIC_DISPATCH(conv_bytes)(bwd);
}
ASSAY_CPU_KERNEL(causal_conv1d, convolve_forward, CausalConv1dForward)
ASSAY_CPU_WORKSPACE_KERNEL(causal_conv1d, convolve_backward, CausalConv1dBackward)
}  // namespace assay::ops::cpu
#endif
