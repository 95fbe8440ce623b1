// A thread owns kVector neighbouring channels over a tile of time and walks it once, the last
// inputs in registers. So x is read once (and K − 1 steps more a tile), in pieces of kVector
// channels, and y written once.
#include <algorithm>
#include <initializer_list>

#include "ops/causal_conv1d/kernel.h"
#include "ops/cuda/math.cuh"
#include "ops/cuda/reduce.cuh"

namespace assay::ops::cuda {
namespace {

constexpr int kThreads = 128, kTile = 64, kMaxWidth = 8;
constexpr int kAhead = 4;  // steps loaded together, while those before are worked on
constexpr int kForwardBytes = 8,
              // of a thread's channels: more would leave fewer threads a register
    kBackwardBytes = 4;

// kVector channels from d on, of sequence b. kWidth ≥ p.width: the weights of the oldest inputs
// are then 0.
template <class T, int kWidth, int kVector>
struct Channels {
  using R = Real<T>;
  using P = Vec<T, kVector>;
  const CausalConv1dForward& p;
  int64_t b, d, begin;
  int last;  // step of the sequence, counted from the tile's begin; no more than two tiles on
  R weight[kWidth][kVector], bias[kVector];

  __device__ Channels(const CausalConv1dForward& p, int64_t b, int64_t d, int64_t begin)
      : p(p), b(b), d(d), begin(begin), last(int(min(p.time - 1 - begin, int64_t{2 * kTile}))) {
    for (int v = 0; v < kVector; ++v) {
      bias[v] = p.bias ? static_cast<const R*>(p.bias)[d + v] : R(0);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const int64_t i = j - (kWidth - p.width);
        weight[j][v] = i >= 0 ? static_cast<const R*>(p.weight)[(d + v) * p.width + i] : R(0);
      }
    }
  }
  __device__ P* at(const View& view, int64_t t) const {
    return reinterpret_cast<P*>(static_cast<T*>(view.data) + b * view.batch_stride +
                                t * view.time_stride + d);
  }
  // kAhead steps from begin + t on; steps after the last repeat it.
  __device__ void fetch(P (&out)[kAhead], const View& view, int t) const {
    const P* from = at(view, begin);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) out[i] = from[min(t + i, last) * (view.time_stride / kVector)];
  }
  __device__ void store(const View& view, int64_t t, const R (&in)[kVector]) const {
    P pack;
#pragma unroll
    for (int v = 0; v < kVector; ++v) pack.at[v] = from_compute<T>(in[v]);
    *at(view, t) = pack;
  }
  // Index in a [B, Dm, K − 1] state of what channel d + v held at time t, t counted from
  // the state's end.
  __device__ int64_t state(int v, int64_t t) const {
    return (b * p.channels + d + v) * (p.width - 1) + p.width - 1 + t;
  }
  // x, also before the sequence.
  __device__ void input(R (&out)[kVector], int64_t t) const {
    const P pack = t >= 0 ? *at(p.x, t) : P{};
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      out[v] = to_compute(pack.at[v]);
      if (t < 0 && t > -p.width && p.initial_state)
        out[v] = static_cast<const R*>(p.initial_state)[state(v, t)];
    }
  }
  __device__ R convolve(const R (&x)[kWidth][kVector], int v) const {
    R sum = bias[v];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += weight[j][v] * x[j][v];
    return sum;
  }
};

template <class T, int kVector>
__device__ void unpack(Real<T> (&out)[kVector], const Vec<T, kVector>& pack) {
#pragma unroll
  for (int v = 0; v < kVector; ++v) out[v] = to_compute(pack.at[v]);
}

template <int kWidth, int kVector, class R>
__device__ void push(R (&window)[kWidth][kVector], const R (&x)[kVector]) {
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
#pragma unroll
    for (int j = 0; j + 1 < kWidth; ++j) window[j][v] = window[j + 1][v];
    window[kWidth - 1][v] = x[v];
  }
}

template <class T, int kWidth, int kVector>
__global__ void __launch_bounds__(kThreads, kWidth == 4 ? 6 : 3)
    forward_kernel(CausalConv1dForward p) {
  using R = Real<T>;
  const int64_t vectors = p.channels / kVector, tiles = ceil_div(p.time, kTile);
  const int64_t job = blockIdx.x * int64_t{kThreads} + threadIdx.x, tile = job / vectors % tiles;
  if (job >= vectors * tiles * p.batch) return;
  const Channels<T, kWidth, kVector> c(p, job / vectors / tiles, job % vectors * kVector,
                                       tile * kTile);
  const int64_t begin = tile * kTile;
  const int steps = int(min(int64_t{kTile}, p.time - begin));

  Vec<T, kVector> next[kAhead];
  c.fetch(next, p.x, 0);
  R window[kWidth][kVector] = {};
#pragma unroll
  for (int i = 1 - kWidth; i < 0; ++i) {
    R x[kVector];
    c.input(x, begin + i);
    push(window, x);
  }
#pragma unroll 1
  for (int t = 0; t < steps; t += kAhead) {
    R x[kAhead][kVector];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) unpack(x[i], next[i]);
    c.fetch(next, p.x, t + kAhead);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      push(window, x[i]);
      R y[kVector];
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        y[v] = c.convolve(window, v);
        if (p.silu) y[v] *= sigmoid_fast(y[v]);
      }
      if (t + i < steps) c.store(p.y, begin + t + i, y);
    }
  }
  if (begin + steps < p.time) return;
  for (int64_t t = -(p.width - 1); t < 0; ++t) {
    R x[kVector];
    c.input(x, p.time + t);
    for (int v = 0; v < kVector; ++v) static_cast<R*>(p.final_state)[c.state(v, t)] = x[v];
  }
}

// A tile yields dx of its own steps, for which it needs d pre of K − 1 steps more, and its part of
// dweight and dbias.
template <class T, int kWidth, int kVector>
__global__ void __launch_bounds__(kThreads, kWidth == 4 ? 5 : 2)
    backward_kernel(CausalConv1dBackward bwd, Real<T>* part_dweight, Real<T>* part_dbias) {
  using R = Real<T>;
  const CausalConv1dForward& p = bwd.forward;
  const int64_t vectors = p.channels / kVector, tiles = ceil_div(p.time, kTile);
  const int64_t job = blockIdx.x * int64_t{kThreads} + threadIdx.x, tile = job / vectors % tiles;
  if (job >= vectors * tiles * p.batch) return;
  const Channels<T, kWidth, kVector> c(p, job / vectors / tiles, job % vectors * kVector,
                                       tile * kTile);
  const int64_t begin = tile * kTile;
  const int steps = int(min(int64_t{kTile}, p.time - begin));

  R window[kWidth][kVector] = {}, dpre[kWidth][kVector] = {}, dweight[kWidth][kVector] = {},
    dbias[kVector] = {};
  Vec<T, kVector> next_x[kAhead], next_dy[kAhead];
  c.fetch(next_x, p.x, 0);
  c.fetch(next_dy, bwd.dy, 0);
#pragma unroll
  for (int i = 1 - kWidth; i < 0; ++i) {
    R x[kVector];
    c.input(x, begin + i);
    push(window, x);
  }
#pragma unroll 1
  for (int first = 0; first < steps + kWidth - 1; first += kAhead) {
    R x[kAhead][kVector], dy[kAhead][kVector];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      unpack(x[i], next_x[i]);
      unpack(dy[i], next_dy[i]);
    }
    c.fetch(next_x, p.x, first + kAhead);
    c.fetch(next_dy, bwd.dy, first + kAhead);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      // steps of pre and of dx, counted from begin
      const int t = first + i, before = t - (kWidth - 1);
      push(window, x[i]);
      R d[kVector], dx[kVector];
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        d[v] = t <= c.last ? dy[i][v] : R(0);
        if (p.silu) {
          const R pre = c.convolve(window, v), gate = sigmoid_fast(pre);
          d[v] *= gate * (1 + pre * (1 - gate));
        }
        const R own = t < steps ? d[v] : R(0);
        dbias[v] += own;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) dweight[j][v] += own * window[j][v];
      }
      push(dpre, d);
      if (before >= steps || (before < 0 && (begin > 0 || before <= -p.width))) continue;
      const int64_t s = begin + before;
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        dx[v] = 0;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) dx[v] += c.weight[j][v] * dpre[kWidth - 1 - j][v];
        if (bwd.dfinal_state && s - p.time > -p.width)
          dx[v] += static_cast<const R*>(bwd.dfinal_state)[c.state(v, s - p.time)];
        if (s < 0 && bwd.dinitial_state) static_cast<R*>(bwd.dinitial_state)[c.state(v, s)] = dx[v];
      }
      if (s >= 0) c.store(bwd.dx, s, dx);
    }
  }
  const int64_t row = (c.b * tiles + tile) * p.channels + c.d;
  for (int v = 0; v < kVector; ++v) {
    part_dbias[row + v] = dbias[v];
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
      if (j >= kWidth - p.width)
        part_dweight[(row + v) * p.width + j - (kWidth - p.width)] = dweight[j][v];
  }
}

int64_t rows(const CausalConv1dForward& p) { return p.batch * ceil_div(p.time, kTile); }

template <class R>
struct BackwardWorkspace {
  R *dweight, *dbias;
  BackwardWorkspace(const CausalConv1dForward& p, WorkspaceArena& arena)
      : dweight(arena.take<R>(rows(p) * p.channels * p.width)),
        dbias(arena.take<R>(rows(p) * p.channels)) {}
};

void check(const CausalConv1dForward& p) {
  if (p.width < 1 || p.width > kMaxWidth)
    throw Unsupported("causal_conv1d on CUDA takes a width of 1 to 8, not " +
                      std::to_string(p.width));
}

// f(an integral constant of kWidth, one of kVector): kVector elements are `bytes` wide where that
// is aligned, else 1.
template <class T, int kBytes, class F>
void with_shape(const CausalConv1dForward& p, std::initializer_list<View> views, F&& f) {
  constexpr int kVector = std::max<int>(1, kBytes / sizeof(T));
  auto with_width = [&](auto vector) {
    if (p.width <= 4) f(std::integral_constant<int, 4>{}, vector);
    else f(std::integral_constant<int, 8>{}, vector);
  };
  if (kVector == 1 ||
      (p.channels % kVector == 0 && rows_aligned(views, sizeof(T), sizeof(T) * kVector)))
    with_width(std::integral_constant<int, kVector>{});
  else if constexpr (kVector > 1) with_width(std::integral_constant<int, 1>{});
}

}  // namespace

size_t workspace_bytes(const CausalConv1dBackward& bwd) {
  return with_type(bwd.forward.dtype, [&](auto type) {
    return workspace_size<BackwardWorkspace<Real<decltype(type)>>>(bwd.forward);
  });
}

void causal_conv1d(const CausalConv1dForward& p, Stream stream) {
  check(p);
  with_type(p.dtype, [&](auto type) {
    using T = decltype(type);
    with_shape<T, kForwardBytes>(p, {p.x, p.y}, [&](auto width, auto vector) {
      launch_threads(forward_kernel<T, width(), vector()>, p.channels / vector() * rows(p),
                     kThreads, stream, p);
    });
  });
}

void causal_conv1d(const CausalConv1dBackward& bwd, void* workspace, Stream stream) {
  const CausalConv1dForward& p = bwd.forward;
  check(p);
  with_type(p.dtype, [&](auto type) {
    using T = decltype(type);
    using R = Real<T>;
    const auto scratch = workspace_at<BackwardWorkspace<R>>(workspace, p);
    with_shape<T, kBackwardBytes>(p, {p.x, bwd.dy, bwd.dx}, [&](auto width, auto vector) {
      launch_threads(backward_kernel<T, width(), vector()>, p.channels / vector() * rows(p),
                     kThreads, stream, bwd, scratch.dweight, scratch.dbias);
    });
    sum_rows(scratch.dweight, bwd.dweight, rows(p), p.channels * p.width, stream);
    sum_rows(scratch.dbias, bwd.dbias, rows(p), p.channels, stream);
  });
}

}  // namespace assay::ops::cuda
