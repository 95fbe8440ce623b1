// A thread owns kVector neighbouring channels over a tile of time and walks it once, the last
// inputs in registers. So x is read once (and K − 1 steps more a tile), in pieces of kVector
// channels, and y written once.
#include <algorithm>
#include <initializer_list>

#include "ops/cuda/math.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/recurrence/causal_conv1d/kernel.h"

namespace assay::ops::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTile = 64;
constexpr int kMaxWidth = 8;
constexpr int kAhead = 4;  // steps loaded together, while those before are worked on
constexpr int kForwardBytes = 8;
// bytes of a thread's channels: more would leave registers for fewer threads
constexpr int kBackwardBytes = 4;

// The steps of a sequence tensor from `begin` on, kVector channels from d on.
template <class T, int kVector>
struct Steps {
  char* data;
  int stride;  // in bytes; with_shape() refuses longer ones
  __device__ Steps(const View& view, int64_t b, int64_t begin, int64_t d)
      : data(static_cast<char*>(view.data) +
             int64_t{sizeof(T)} * (b * view.batch_stride + begin * view.time_stride + d)),
        stride(int(view.time_stride * int64_t{sizeof(T)})) {}
  __device__ Vec<T, kVector>& operator[](int t) const {
    return *reinterpret_cast<Vec<T, kVector>*>(data + int64_t{t} * stride);
  }
  // kAhead steps from t on; steps after the last repeat it.
  __device__ void fetch(Vec<T, kVector> (&out)[kAhead], int t, int last) const {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) out[i] = (*this)[min(t + i, last)];
  }
};

template <class T, int kVector>
__device__ void unpack(Real<T> (&out)[kVector], const Vec<T, kVector>& pack) {
#pragma unroll
  for (int v = 0; v < kVector; ++v) out[v] = to_compute(pack.at[v]);
}
template <class T, int kVector>
__device__ void store(Vec<T, kVector>& to, const Real<T> (&in)[kVector]) {
  Vec<T, kVector> pack;
#pragma unroll
  for (int v = 0; v < kVector; ++v) pack.at[v] = from_compute<T>(in[v]);
  to = pack;
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

// A thread's tile: kVector channels from d on, of sequence b. kWidth ≥ args.width: the weights of
// the oldest inputs are then 0.
template <class T, int kWidth, int kVector>
struct Tile {
  using R = Real<T>;
  const CausalConv1dForward& args;
  int64_t index;
  int64_t d;
  int64_t b;
  int64_t begin;
  // steps: of the tile; last: the last step of the sequence from begin, 2 kTile at most
  int steps;
  int last;
  R weight[kWidth][kVector];
  R bias[kVector];

  __device__ Tile(const CausalConv1dForward& args, int64_t job)
      : args(args),
        index(job / (args.channels / kVector)),
        d(job % (args.channels / kVector) * kVector),
        b(index / ceil_div(args.time, kTile)),
        begin(index % ceil_div(args.time, kTile) * kTile),
        steps(int(min(int64_t{kTile}, args.time - begin))),
        last(int(min(args.time - 1 - begin, int64_t{2 * kTile}))) {
    for (int v = 0; v < kVector; ++v) {
      bias[v] = args.bias ? static_cast<const R*>(args.bias)[d + v] : R(0);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const int64_t i = j - (kWidth - args.width);
        weight[j][v] = i >= 0 ? static_cast<const R*>(args.weight)[(d + v) * args.width + i] : R(0);
      }
    }
  }
  __device__ Steps<T, kVector> in(const View& view) const { return {view, b, begin, d}; }
  // Index in a [B, Dm, K − 1] state of what channel d + v held at time t, t counted from
  // the state's end.
  __device__ int64_t state(int v, int64_t t) const {
    return (b * args.channels + d + v) * (args.width - 1) + args.width - 1 + t;
  }
  // x, also before the sequence.
  __device__ void input(R (&out)[kVector], int t) const {
    const bool inside = begin + t >= 0;
    const Vec<T, kVector> pack = inside ? in(args.x)[t] : Vec<T, kVector>{};
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      out[v] = to_compute(pack.at[v]);
      if (!inside && begin + t > -args.width && args.initial_state)
        out[v] = static_cast<const R*>(args.initial_state)[state(v, begin + t)];
    }
  }
  // The K − 1 inputs before the tile.
  __device__ void fill(R (&window)[kWidth][kVector]) const {
#pragma unroll
    for (int i = 1 - kWidth; i < 0; ++i) {
      R x[kVector];
      input(x, i);
      push(window, x);
    }
  }
  __device__ R convolve(const R (&x)[kWidth][kVector], int v) const {
    R sum = bias[v];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += weight[j][v] * x[j][v];
    return sum;
  }
};

template <class T, int kWidth, int kVector, bool kSilu>
__global__ void __launch_bounds__(kThreads, kWidth == 4 ? 6 : 3)
    forward_kernel(CausalConv1dForward args, int64_t jobs) {
  using R = Real<T>;
  const int64_t job = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (job >= jobs) return;
  const Tile<T, kWidth, kVector> tile(args, job);
  const Steps<T, kVector> of_x = tile.in(args.x);
  const Steps<T, kVector> of_y = tile.in(args.y);
  Vec<T, kVector> next[kAhead];
  of_x.fetch(next, 0, tile.last);
  R window[kWidth][kVector] = {};
  tile.fill(window);
#pragma unroll 1
  for (int t = 0; t < tile.steps; t += kAhead) {
    R x[kAhead][kVector];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) unpack(x[i], next[i]);
    of_x.fetch(next, t + kAhead, tile.last);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      push(window, x[i]);
      R y[kVector];
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        y[v] = tile.convolve(window, v);
        if (kSilu) y[v] *= sigmoid_fast(y[v]);
      }
      if (t + i < tile.steps) store(of_y[t + i], y);
    }
  }
  if (tile.begin + tile.steps < args.time) return;
  for (int64_t t = -(args.width - 1); t < 0; ++t) {
    R x[kVector];
    tile.input(x, tile.steps + int(t));
    for (int v = 0; v < kVector; ++v) static_cast<R*>(args.final_state)[tile.state(v, t)] = x[v];
  }
}

// The part of dy with channel d, moved so that d is the offset in its rows.
template <class T>
__device__ View part_of(const CausalConv1dBackward& bwd, int64_t d) {
  View part = bwd.dy[0];
#pragma unroll
  for (int i = 1; i < kConvParts; ++i) {
    if (!bwd.dy[i].data || d < bwd.first[i]) continue;
    part = bwd.dy[i];
    part.data = static_cast<T*>(part.data) - bwd.first[i];
  }
  return part;
}

// A tile yields dx of its own steps, for which it needs d pre of K − 1 steps more, and its part of
// dweight and dbias. Only rounds at the edges of a tile test each step.
template <class T, int kWidth, int kVector, bool kSilu>
__global__ void __launch_bounds__(kThreads, kWidth == 4 ? 5 : 2)
    backward_kernel(const __grid_constant__ CausalConv1dBackward bwd, Real<T>* part_dweight,
                    Real<T>* part_dbias, int64_t jobs) {
  using R = Real<T>;
  const CausalConv1dForward& args = bwd.forward;
  const int64_t job = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (job >= jobs) return;
  const Tile<T, kWidth, kVector> tile(args, job);
  const Steps<T, kVector> of_x = tile.in(args.x);
  const Steps<T, kVector> of_dy = tile.in(part_of<T>(bwd, tile.d));
  const Steps<T, kVector> of_dx = tile.in(bwd.dx);
  R window[kWidth][kVector] = {};
  R dpre[kWidth][kVector] = {};
  R dweight[kWidth][kVector] = {};
  R dbias[kVector] = {};
  Vec<T, kVector> next_x[kAhead];
  Vec<T, kVector> next_dy[kAhead];
  of_x.fetch(next_x, 0, tile.last);
  of_dy.fetch(next_dy, 0, tile.last);
  tile.fill(window);
  const auto round = [&](int first, auto edge) {
    constexpr bool kEdge = decltype(edge)::value;
    R x[kAhead][kVector];
    R dy[kAhead][kVector];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      unpack(x[i], next_x[i]);
      unpack(dy[i], next_dy[i]);
    }
    of_x.fetch(next_x, first + kAhead, tile.last);
    of_dy.fetch(next_dy, first + kAhead, tile.last);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      // steps of pre and of dx, counted from begin
      const int t = first + i;
      const int before = t - (kWidth - 1);
      push(window, x[i]);
      R d[kVector];
      R dx[kVector];
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        d[v] = !kEdge || t <= tile.last ? dy[i][v] : R(0);
        if (kSilu) {
          const R pre = tile.convolve(window, v);
          const R gate = sigmoid_fast(pre);
          d[v] *= gate * (1 + pre * (1 - gate));
        }
        const R own = !kEdge || t < tile.steps ? d[v] : R(0);
        dbias[v] += own;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) dweight[j][v] += own * window[j][v];
      }
      push(dpre, d);
      if (kEdge &&
          (before >= tile.steps || (before < 0 && (tile.begin > 0 || before <= -args.width))))
        continue;
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        dx[v] = 0;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) dx[v] += tile.weight[j][v] * dpre[kWidth - 1 - j][v];
        const int64_t s = tile.begin + before;
        if (kEdge && bwd.dfinal_state && s - args.time > -args.width)
          dx[v] += static_cast<const R*>(bwd.dfinal_state)[tile.state(v, s - args.time)];
        if (kEdge && s < 0 && bwd.dinitial_state)
          static_cast<R*>(bwd.dinitial_state)[tile.state(v, s)] = dx[v];
      }
      if (!kEdge || before >= 0) store(of_dx[before], dx);
    }
  };
#pragma unroll 1
  for (int first = 0; first < tile.steps + kWidth - 1; first += kAhead) {
    // Then no step of the round is near the last ones of the sequence either
    if (first >= kWidth && first + kAhead <= tile.steps) round(first, std::false_type());
    else round(first, std::true_type());
  }
  const int64_t row = tile.index * args.channels + tile.d;
  for (int v = 0; v < kVector; ++v) {
    part_dbias[row + v] = dbias[v];
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
      if (j >= kWidth - args.width)
        part_dweight[(row + v) * args.width + j - (kWidth - args.width)] = dweight[j][v];
  }
}

int64_t rows(const CausalConv1dForward& args) { return args.batch * ceil_div(args.time, kTile); }

template <class R>
struct BackwardWorkspace {
  R* dweight;
  R* dbias;
  BackwardWorkspace(const CausalConv1dForward& args, WorkspaceArena& arena)
      : dweight(arena.take<R>(rows(args) * args.channels * args.width)),
        dbias(arena.take<R>(rows(args) * args.channels)) {}
};

void check(const CausalConv1dForward& args) {
  if (args.width < 1 || args.width > kMaxWidth)
    throw Unsupported("causal_conv1d on CUDA takes a width of 1 to 8, not " +
                      std::to_string(args.width));
}

// f(integral constants of kWidth, kVector and kSilu): kVector elements are `bytes` wide where that
// is aligned and no part of dy ends between them (`together`), else 1.
template <class T, int kBytes, class F>
void with_shape(const CausalConv1dForward& args, std::initializer_list<View> views, bool together,
                F&& f) {
  constexpr int kVector = std::max<int>(1, kBytes / sizeof(T));
  for (const View& view : views)
    if (view.time_stride > INT32_MAX / int64_t{sizeof(T)})
      throw Unsupported("causal_conv1d on CUDA takes steps of less than 2^31 bytes");
  auto with_width = [&](auto vector) {
    with_constant<false, true>(args.silu, [&](auto silu) {
      if (args.width <= 4) f(std::integral_constant<int, 4>{}, vector, silu);
      else f(std::integral_constant<int, 8>{}, vector, silu);
    });
  };
  if (kVector == 1 || (together && args.channels % kVector == 0 &&
                       rows_aligned(views, sizeof(T), sizeof(T) * kVector)))
    with_width(std::integral_constant<int, kVector>{});
  else if constexpr (kVector > 1) with_width(std::integral_constant<int, 1>{});
}

}  // namespace

size_t workspace_bytes(const CausalConv1dBackward& bwd) {
  return with_type(bwd.forward.dtype, [&](auto type) {
    return workspace_size<BackwardWorkspace<Real<decltype(type)>>>(bwd.forward);
  });
}

void causal_conv1d(const CausalConv1dForward& args, Stream stream) {
  check(args);
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    with_shape<T, kForwardBytes>(args, {args.x, args.y}, true,
                                 [&](auto width, auto vector, auto silu) {
                                   const int64_t jobs = args.channels / vector() * rows(args);
                                   launch_threads(forward_kernel<T, width(), vector(), silu()>,
                                                  jobs, kThreads, stream, args, jobs);
                                 });
  });
}

void causal_conv1d(const CausalConv1dBackward& bwd, void* workspace, Stream stream) {
  const CausalConv1dForward& args = bwd.forward;
  check(args);
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    using R = Real<T>;
    const auto scratch = workspace_at<BackwardWorkspace<R>>(workspace, args);
    const bool together = bwd.first[1] % kBackwardBytes == 0 && bwd.first[2] % kBackwardBytes == 0;
    const View& dy = bwd.dy[0];
    const auto more = [&](int i) { return bwd.dy[i].data ? bwd.dy[i] : dy; };
    with_shape<T, kBackwardBytes>(args, {args.x, dy, more(1), more(2), bwd.dx}, together,
                                  [&](auto width, auto vector, auto silu) {
                                    const int64_t jobs = args.channels / vector() * rows(args);
                                    launch_threads(backward_kernel<T, width(), vector(), silu()>,
                                                   jobs, kThreads, stream, bwd, scratch.dweight,
                                                   scratch.dbias, jobs);
                                  });
    sum_rows(scratch.dweight, bwd.dweight, rows(args), args.channels * args.width, stream);
    sum_rows(scratch.dbias, bwd.dbias, rows(args), args.channels, stream);
  });
}

}  // namespace assay::ops::cuda
