#pragma once
// Selective scan for any state size and any dtype: a warp walks one channel, its lanes hold the
// states. Simple rather than fast; cuda_n16.cuh is the fast path.
#include "ops/cuda/math.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/selective_scan/kernel.h"

namespace assay::ops::cuda::any {

constexpr int kChunk = 32, kWarps = 8, kMaxPerLane = 8;

// Where a [B, T, ...] tensor of T holds the element (b, t, i).
template <class T>
__device__ T* at(const View& v, int64_t b, int64_t t, int64_t i) {
  return static_cast<T*>(v.data) + b * v.batch_stride + t * v.time_stride + i;
}
template <class T>
__device__ Real<T> read(const View& v, int64_t b, int64_t t, int64_t i) {
  return to_compute(*at<T>(v, b, t, i));
}
template <class R>
__device__ R read_or_zero(const void* data, int64_t i) {
  return data ? static_cast<const R*>(data)[i] : R(0);
}
template <class R>
__device__ R softplus_exact(R x) {
  return x > R(20) ? x : log1p(exp(x));
}
// One channel of one sequence: what a warp needs to know about it.
template <class T, int kPerLane>
struct Channel {
  using R = Real<T>;
  const SelectiveScanForward& p;
  int64_t b, d, group;
  int lane;
  R A[kPerLane], bias, D;

  __device__ Channel(const SelectiveScanForward& p, int64_t b, int64_t d)
      : p(p), b(b), d(d), group(d / (p.channels / p.groups)), lane(threadIdx.x % 32) {
    for (int k = 0; k < kPerLane; ++k)
      A[k] = has(k) ? static_cast<const R*>(p.A)[d * p.state_size + state(k)] : R(0);
    bias = read_or_zero<R>(p.delta_bias, d);
    D = read_or_zero<R>(p.D, d);
  }
  __device__ int state(int k) const { return lane + 32 * k; }
  __device__ bool has(int k) const { return state(k) < p.state_size; }
  __device__ R u(int64_t t) const { return read<T>(p.u, b, t, d); }
  __device__ R step_size(int64_t t) const {
    const R x = read<T>(p.delta, b, t, d) + bias;
    return p.delta_softplus ? softplus_exact(x) : x;
  }
  __device__ R B(int64_t t, int k) const {
    return has(k) ? read<T>(p.B, b, t, group * p.state_size + state(k)) : R(0);
  }
  __device__ R C(int64_t t, int k) const {
    return has(k) ? read<T>(p.C, b, t, group * p.state_size + state(k)) : R(0);
  }
  // Index of state k in a [B, rows, Dm, N] tensor.
  __device__ int64_t index(int64_t rows, int64_t row, int k) const {
    return ((b * rows + row) * p.channels + d) * p.state_size + state(k);
  }
};

template <class T, int kPerLane>
__global__ void __launch_bounds__(32 * kWarps) forward_kernel(SelectiveScanForward p) {
  using R = Real<T>;
  const int64_t job = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (job >= p.batch * p.channels) return;
  const Channel<T, kPerLane> c(p, job / p.channels, job % p.channels);
  const int64_t chunks = ceil_div(p.time, kChunk);
  R S[kPerLane];
  for (int k = 0; k < kPerLane; ++k)
    S[k] = c.has(k) ? read_or_zero<R>(p.initial_state, c.index(1, 0, k)) : R(0);

  for (int64_t t = 0; t < p.time; ++t) {
    if (p.chunk_states && t % kChunk == 0)
      for (int k = 0; k < kPerLane; ++k)
        if (c.has(k)) static_cast<R*>(p.chunk_states)[c.index(chunks, t / kChunk, k)] = S[k];
    const R step = c.step_size(t), u = c.u(t);
    R y = 0;
    for (int k = 0; k < kPerLane; ++k) {
      S[k] = exp(step * c.A[k]) * S[k] + step * u * c.B(t, k);
      y += S[k] * c.C(t, k);
    }
    y = warp_sum(y) + c.D * u;
    if (p.z.data) {
      const R z = read<T>(p.z, c.b, t, c.d);
      y *= z / (1 + exp(-z));
    }
    if (c.lane == 0) *at<T>(p.y, c.b, t, c.d) = from_compute<T>(y);
  }
  for (int k = 0; k < kPerLane; ++k)
    if (c.has(k)) static_cast<R*>(p.final_state)[c.index(1, 0, k)] = S[k];
}

// Blocks that share the channels of one group of one sequence. Each sums its channels' part of dB
// and dC by itself.
inline int64_t sharers(const SelectiveScanForward& p) {
  const int64_t wanted = std::max<int64_t>(1, 1024 / (kWarps * p.batch * p.groups));
  return std::min({wanted, int64_t{16}, ceil_div(p.channels / p.groups, kWarps)});
}

template <class R>
struct GeneralWorkspace {
  R *states, *dB, *dC, *dA, *dD, *dbias;
  GeneralWorkspace(const SelectiveScanForward& p, WorkspaceArena& arena)
      : states(arena.take<R>(sharers(p) * p.batch * p.groups * kWarps * kChunk * p.state_size)),
        dB(arena.take<R>(sharers(p) * p.batch * p.time * p.groups * p.state_size)),
        dC(arena.take<R>(sharers(p) * p.batch * p.time * p.groups * p.state_size)),
        dA(arena.take<R>(p.batch * p.channels * p.state_size)),
        dD(arena.take<R>(p.batch * p.channels)),
        dbias(arena.take<R>(p.batch * p.channels)) {}
};

// A block takes kWarps channels of its group at a time, each warp one of them, all at the same t:
// so the block can add up dB_t and dC_t over its channels before it goes one step back.
template <class T, int kPerLane>
__global__ void __launch_bounds__(32 * kWarps)
    backward_kernel(SelectiveScanBackward bwd, GeneralWorkspace<Real<T>> scratch, int sharers) {
  using R = Real<T>;
  const SelectiveScanForward& p = bwd.forward;
  __shared__ R part_dB[kWarps][32 * kPerLane], part_dC[kWarps][32 * kPerLane];
  const int warp = threadIdx.x / 32;
  const int64_t sharer = blockIdx.x % sharers, group = blockIdx.x / sharers % p.groups,
                b = blockIdx.x / sharers / p.groups;
  const int64_t width = p.channels / p.groups, chunks = ceil_div(p.time, kChunk);
  R* const states = scratch.states + (int64_t{blockIdx.x} * kWarps + warp) * kChunk * p.state_size;

  for (int64_t first = sharer * kWarps; first < width; first += sharers * kWarps) {
    const bool idle = first + warp >= width;  // such a warp only helps to add up
    const Channel<T, kPerLane> c(p, b, group * width + (idle ? 0 : first + warp));
    R G[kPerLane], dA[kPerLane], dD = 0, dbias = 0;
    for (int k = 0; k < kPerLane; ++k) {
      G[k] = c.has(k) ? read_or_zero<R>(bwd.dfinal_state, c.index(1, 0, k)) : R(0);
      dA[k] = 0;
    }

    for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
      const int64_t begin = chunk * kChunk, end = min(begin + kChunk, p.time);
      R S[kPerLane];
      for (int k = 0; k < kPerLane; ++k)
        S[k] = c.has(k) ? static_cast<const R*>(p.chunk_states)[c.index(chunks, chunk, k)] : R(0);
      for (int64_t t = begin; t < end; ++t) {
        const R step = c.step_size(t), x = step * c.u(t);
        for (int k = 0; k < kPerLane; ++k) {
          if (c.has(k)) states[(t - begin) * p.state_size + c.state(k)] = S[k];
          S[k] = exp(step * c.A[k]) * S[k] + x * c.B(t, k);
        }
      }
      for (int64_t t = end - 1; t >= begin; --t) {
        const R step = c.step_size(t), u = c.u(t), dy = read<T>(bwd.dy, b, t, c.d);
        const R z = p.z.data ? read<T>(p.z, b, t, c.d) : R(0), sigmoid = 1 / (1 + exp(-z));
        const R dout = p.z.data ? dy * z * sigmoid : dy;
        R y = 0, dx = 0, dstep = 0;
        for (int k = 0; k < kPerLane; ++k) {
          const R a = exp(step * c.A[k]), B = c.B(t, k), C = c.C(t, k);
          const R kept = c.has(k) ? a * states[(t - begin) * p.state_size + c.state(k)] : R(0);
          const R S = kept + step * u * B;
          G[k] += dout * C;
          y += S * C;
          dx += G[k] * B;
          dstep += G[k] * kept * c.A[k];
          dA[k] += G[k] * kept * step;
          part_dB[warp][c.state(k)] = idle ? R(0) : G[k] * step * u;
          part_dC[warp][c.state(k)] = idle ? R(0) : S * dout;
          G[k] *= a;
        }
        y = warp_sum(y) + c.D * u;
        dx = warp_sum(dx);
        dstep = warp_sum(dstep) + u * dx;
        // σ(x) = 1 − exp(−softplus_exact(x))
        const R draw = p.delta_softplus ? dstep * -expm1(-step) : dstep;
        dD += dout * u;
        dbias += draw;
        if (c.lane == 0 && !idle) {
          *at<T>(bwd.du, b, t, c.d) = from_compute<T>(c.D * dout + step * dx);
          *at<T>(bwd.ddelta, b, t, c.d) = from_compute<T>(draw);
          if (p.z.data)
            *at<T>(bwd.dz, b, t, c.d) = from_compute<T>(dy * y * sigmoid * (1 + z * (1 - sigmoid)));
        }
        __syncthreads();
        for (int n = threadIdx.x; n < p.state_size; n += 32 * kWarps) {
          const int64_t i =
              (((sharer * p.batch + b) * p.time + t) * p.groups + group) * p.state_size + n;
          R dB = first == sharer * kWarps ? R(0) : scratch.dB[i],
            dC = first == sharer * kWarps ? R(0) : scratch.dC[i];
          for (int w = 0; w < kWarps; ++w) {
            dB += part_dB[w][n];
            dC += part_dC[w][n];
          }
          scratch.dB[i] = dB;
          scratch.dC[i] = dC;
        }
        __syncthreads();
      }
    }
    if (idle) continue;
    for (int k = 0; k < kPerLane; ++k)
      if (c.has(k)) {
        scratch.dA[c.index(1, 0, k)] = dA[k];
        if (bwd.dinitial_state) static_cast<R*>(bwd.dinitial_state)[c.index(1, 0, k)] = G[k];
      }
    if (c.lane == 0) {
      scratch.dD[b * p.channels + c.d] = dD;
      scratch.dbias[b * p.channels + c.d] = dbias;
    }
  }
}

template <class T>
void forward(const SelectiveScanForward& p, Stream stream) {
  const auto kernel = p.state_size <= 32 ? forward_kernel<T, 1> : forward_kernel<T, kMaxPerLane>;
  launch_threads(kernel, p.batch * p.channels * 32, 32 * kWarps, stream, p);
}

template <class T>
void backward(const SelectiveScanBackward& bwd, void* workspace, Stream stream) {
  using R = Real<T>;
  const SelectiveScanForward& p = bwd.forward;
  const auto s = workspace_at<GeneralWorkspace<R>>(workspace, p);
  const auto kernel = p.state_size <= 32 ? backward_kernel<T, 1> : backward_kernel<T, kMaxPerLane>;
  launch_kernel(kernel, unsigned(sharers(p) * p.batch * p.groups), 32 * kWarps, 0, stream, bwd, s,
                int(sharers(p)));
  const int64_t columns = p.batch * p.time * p.groups * p.state_size;
  sum_rows(s.dB, bwd.dB, sharers(p), columns, stream);
  sum_rows(s.dC, bwd.dC, sharers(p), columns, stream);
  sum_rows(s.dA, bwd.dA, p.batch, p.channels * p.state_size, stream);
  sum_rows(s.dD, bwd.dD, p.batch, p.channels, stream);
  sum_rows(s.dbias, bwd.ddelta_bias, p.batch, p.channels, stream);
}

}  // namespace assay::ops::cuda::any
