#pragma once
// Selective scan for 16 states, fp32 and bf16: time is cut into chunks that run at once.
// README.md counts it.
//   forward:  local_states (each chunk from 0) → carry_states (over the chunks) → outputs
//   backward: local_gradients (states again, dz, dC, the gradient of each chunk's first state)
//             → carry_gradients (over the chunks, backwards) → gradients (du, ddelta, dB, dA)
//             → sums
// A thread is a channel: sums over states stay in the thread. Sums over channels go through
// the tensor cores.
#include "ops/cuda/math.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/selective_scan/cuda_n16_tiles.cuh"
#include "ops/selective_scan/cuda_warp_sum.cuh"

namespace assay::ops::cuda::n16 {

// steps whose states a thread of `gradients` holds in registers, kGroup states at a time
constexpr int kSub = 8;
constexpr int kGroup = 2;
constexpr int kUnrolled = 8;  // steps
constexpr int kCarried = 8;   // chunks

struct ForwardWorkspace {
  // [B, chunks, Dm, N] where the caller keeps no chunk_states; [B, chunks, Dm] Σ Δ of a chunk
  float *starts, *steps;
  ForwardWorkspace(const Plan& a, WorkspaceArena& arena)
      : starts(arena.take<float>(a.p.batch * a.chunks * a.p.channels * kStates)),
        steps(arena.take<float>(a.p.batch * a.chunks * a.p.channels)) {}
};

struct BackwardWorkspace {
  // [B, chunks, Dm] Σ Δ of a chunk; [B, chunks, Dm, N] gradient of the state after a chunk
  float *steps, *ends;
  float* subs;             // [B, chunks · chunk / kSub, N, Dm] state before each kSub steps
  float *dB, *dC;          // [group_tiles, B, T, G, N]
  float *dA, *dD, *dbias;  // [B, chunks, Dm, N], [B, chunks, Dm], [B, chunks, Dm]
  BackwardWorkspace(const Plan& a, WorkspaceArena& arena) {
    const int64_t rows = a.p.batch * a.chunks * a.p.channels,
                  sums = a.group_tiles * a.p.batch * a.p.time * a.p.groups * kStates;
    steps = arena.take<float>(rows);
    ends = arena.take<float>(rows * kStates);
    subs = arena.take<float>(rows * a.chunk / kSub * kStates);
    dB = arena.take<float>(sums);
    dC = arena.take<float>(sums);
    dA = arena.take<float>(rows * kStates);
    dD = arena.take<float>(rows);
    dbias = arena.take<float>(rows);
  }
  // Into L2 the states that the block needs for the tile from step t on: a line of 128
  // bytes a thread.
  template <class T>
  __device__ void prefetch(const Plan& a, const LaneState<T>& lane, int t) const {
    static_assert(kTile / kSub * kStates * kThreads * sizeof(float) == kThreads * 128);
    const int line = threadIdx.x % (kThreads / 32), row = threadIdx.x / (kThreads / 32);
    const float* states = sub(a, lane, t) - (lane.live ? threadIdx.x : 0) + row * a.p.channels;
    if (line * 32 < lane.width) prefetch_l2(states + line * 32);
  }
  // This channel's state before step t.
  template <class T>
  __device__ float* sub(const Plan& a, const LaneState<T>& lane, int t) const {
    return subs + (lane.b * a.chunks * a.chunk + lane.begin + t) / kSub * kStates * a.p.channels +
           lane.d;
  }
};

__device__ inline void load_states(float (&S)[kStates], const float* in) {
#pragma unroll
  for (int n = 0; n < kStates; ++n) S[n] = in[n];
}
__device__ inline void store_states(float* out, const float (&S)[kStates]) {
#pragma unroll
  for (int n = 0; n < kStates; ++n) out[n] = S[n];
}

// The state that each chunk but the last adds to what it was given.
template <class T>
__global__ void __launch_bounds__(kThreads)
    local_states_kernel(Plan a, float* starts, float* sums) {
  __shared__ typename TileLoader<T, 2>::LoaderSmem shared;
  const LaneState<T> lane(a);
  if (lane.chunk + 1 == a.chunks) return;
  const View views[] = {a.p.u, a.p.delta};
  TileLoader<T, 2> feed{shared, lane, a.aligned, views};
  feed.start(0);
  float S[kStates] = {}, A[kStates], sum = 0;
  lane.decay_rates(A);
  for (int tile = 0; tile < lane.steps; tile += kTile) {
    feed.finish();
    feed.start(tile + kTile);
#pragma unroll kUnrolled
    for (int i = 0; i < kTile; ++i) {
      const float step = lane.step_size(feed.get(1, i), tile + i < lane.steps),
                  x = step * feed.get(0, i);
      sum += step;
#pragma unroll
      for (int n = 0; n < kStates; ++n) S[n] = ex2_approx(step * A[n]) * S[n] + x * shared.B[i][n];
    }
    __syncthreads();
  }
  if (!lane.live) return;
  store_states(starts + lane.row(a.chunks, lane.chunk + 1) * kStates, S);
  sums[lane.row(a.chunks, lane.chunk)] = sum;
}

// A thread is a state here. starts[c + 1], which holds what chunk c adds, becomes the state before
// chunk c + 1.
__global__ void __launch_bounds__(256)
    carry_states_kernel(Plan a, float* starts, const float* sums) {
  const int64_t states = a.p.channels * kStates, i = blockIdx.x * int64_t{256} + threadIdx.x;
  if (i >= a.p.batch * states) return;
  const int64_t b = i / states, state = i % states;
  const float A = static_cast<const float*>(a.p.A)[state] * kLog2e;
  float* S = starts + b * a.chunks * states + state;
  const float* sum = sums + b * a.chunks * a.p.channels + state / kStates;
  float carried = a.p.initial_state ? static_cast<const float*>(a.p.initial_state)[i] : 0.f;
  S[0] = carried;
  for (int64_t c = 0; c + 1 < a.chunks; c += kCarried) {
    float added[kCarried], decay[kCarried];
#pragma unroll
    for (int k = 0; k < kCarried; ++k) {
      const bool has = c + k + 1 < a.chunks;
      added[k] = has ? S[(c + k + 1) * states] : 0.f;
      decay[k] = has ? ex2_approx(A * sum[(c + k) * a.p.channels]) : 1.f;
    }
#pragma unroll
    for (int k = 0; k < kCarried; ++k) {
      carried = decay[k] * carried + added[k];
      if (c + k + 1 < a.chunks) S[(c + k + 1) * states] = carried;
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) outputs_kernel(Plan a, const float* starts) {
  __shared__ typename TileLoader<T, 3>::LoaderSmem shared;
  const LaneState<T> lane(a);
  const View views[] = {a.p.u, a.p.delta, a.p.z};
  TileLoader<T, 3> feed{shared, lane, a.aligned, views};
  feed.start(0);
  const Column<T> ys = lane.kept_column(a.p.y);
  const bool gated = a.p.z.data;
  float S[kStates], A[kStates];
  load_states(S, starts + lane.row(a.chunks, lane.chunk) * kStates);
  lane.decay_rates(A);
  for (int tile = 0; tile < lane.steps; tile += kTile) {
    feed.finish();
    feed.start(tile + kTile);
#pragma unroll kUnrolled
    for (int i = 0; i < kTile; ++i) {
      const float step = lane.step_size(feed.get(1, i), tile + i < lane.steps), u = feed.get(0, i),
                  x = step * u;
      float y[2] = {lane.D * u, 0};
#pragma unroll
      for (int n = 0; n < kStates; ++n) {
        S[n] = ex2_approx(step * A[n]) * S[n] + x * shared.B[i][n];
        y[n % 2] += S[n] * shared.C[i][n];
      }
      const float gate = gated ? SiluGate(feed.get(2, i)).value : 1.f;
      lane.store(ys, tile + i, (y[0] + y[1]) * gate);
    }
    __syncthreads();
  }
  if (lane.live && lane.chunk + 1 == a.chunks)
    store_states(static_cast<float*>(a.p.final_state) + lane.row(1, 0) * kStates, S);
}

// The state again, from each chunk's start, and with it y for dz, and dC. H becomes the gradient of
// the chunk's first state from the chunk's own outputs: Σ_t P_t C_t dout_t, P_t the product of the
// decays from the chunk's begin to t.
template <class T>
struct LocalGradientsShared {
  typename TileLoader<T, 4>::LoaderSmem feed;
  Parts parts;
};
template <class T>
__global__ void __launch_bounds__(kThreads, 3)
    local_gradients_kernel(Plan a, SelectiveScanBackward bwd, BackwardWorkspace s) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<LocalGradientsShared<T>*>(memory);
  const LaneState<T> lane(a);
  const WarpSum<T> channels;
  const View views[] = {a.p.u, a.p.delta, a.p.z, bwd.dy};
  TileLoader<T, 4> feed{shared.feed, lane, a.aligned, views};
  feed.start(0);
  const Column<T> dzs = lane.kept_column(bwd.dz);
  const bool gated = a.p.z.data;
  float S[kStates], A[kStates], P[kStates], H[kStates] = {}, sum = 0;
  load_states(
      S, static_cast<const float*>(a.p.chunk_states) + lane.row(a.chunks, lane.chunk) * kStates);
  lane.decay_rates(A);
#pragma unroll
  for (float& x : P) x = 1;
  for (int tile = 0; tile < lane.steps; tile += kTile) {
    feed.finish();
    feed.start(tile + kTile);
#pragma unroll 1
    for (int sub = 0; sub < kTile; sub += kSub) {
      if (lane.live) {
        float* out = s.sub(a, lane, tile + sub);
#pragma unroll
        for (int n = 0; n < kStates; ++n) out[n * a.p.channels] = S[n];
      }
      float dC[4] = {};  // states × kSub steps, spread over the warp
#pragma unroll
      for (int i = sub; i < sub + kSub; ++i) {
        const bool exists = tile + i < lane.steps;
        const float step = lane.step_size(feed.get(1, i), exists), u = feed.get(0, i), x = step * u;
        const SiluGate gate(gated ? feed.get(2, i) : 0.f);
        const float dy = exists ? feed.get(3, i) : 0.f, dout = gated ? dy * gate.value : dy;
        float y = lane.D * u, product[kStates];
        sum += step;
#pragma unroll
        for (int n = 0; n < kStates; ++n) {
          const float decay = ex2_approx(step * A[n]);
          S[n] = decay * S[n] + x * shared.feed.B[i][n];
          y += S[n] * shared.feed.C[i][n];
          P[n] *= decay;
          H[n] += P[n] * (shared.feed.C[i][n] * dout);
          product[n] = S[n] * dout;
        }
        if (gated) lane.store(dzs, tile + i, dy * y * gate.slope);
        channels.add(dC, i - sub, product);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k)
        shared.parts[threadIdx.x / 32][sub + channels.column(k)][channels.row(k)] = dC[k];
    }
    __syncthreads();
    store_parts(s.dC, shared.parts, lane, tile);
  }
  if (!lane.live) return;
  s.steps[lane.row(a.chunks, lane.chunk)] = sum;
  store_states(s.ends + lane.row(a.chunks, lane.chunk) * kStates, H);
}

// A thread is a state here. ends[c], which holds H of chunk c, becomes the gradient of the state
// after chunk c.
__global__ void __launch_bounds__(256)
    carry_gradients_kernel(Plan a, SelectiveScanBackward bwd, BackwardWorkspace s) {
  const int64_t states = a.p.channels * kStates, i = blockIdx.x * int64_t{256} + threadIdx.x;
  if (i >= a.p.batch * states) return;
  const int64_t b = i / states, state = i % states;
  const float A = static_cast<const float*>(a.p.A)[state] * kLog2e;
  float* G = s.ends + b * a.chunks * states + state;
  const float* sum = s.steps + b * a.chunks * a.p.channels + state / kStates;
  float carried = bwd.dfinal_state ? static_cast<const float*>(bwd.dfinal_state)[i] : 0.f;
  for (int64_t c = a.chunks - 1; c >= 0; c -= kCarried) {
    float added[kCarried], decay[kCarried];
#pragma unroll
    for (int k = 0; k < kCarried; ++k) {
      added[k] = c >= k ? G[(c - k) * states] : 0.f;
      decay[k] = c >= k ? ex2_approx(A * sum[(c - k) * a.p.channels]) : 1.f;
    }
#pragma unroll
    for (int k = 0; k < kCarried; ++k) {
      if (c >= k) G[(c - k) * states] = carried;
      carried = decay[k] * carried + added[k];
    }
  }
  if (bwd.dinitial_state) static_cast<float*>(bwd.dinitial_state)[i] = carried;
}

// Backwards through a chunk, kSub steps at a time, kGroup states at a time: first forwards from the
// stored state, the decays and what they keep of the state into registers, then back. G is the
// gradient of the state.
template <class T>
struct GradientsShared {
  typename TileLoader<T, 4>::LoaderSmem feed;
  Parts parts;
  // each thread its column
  float rates[kStates][kThreads], G[kStates][kThreads], dA[kStates][kThreads];
};
template <class T>
__global__ void __launch_bounds__(kThreads, 3)
    gradients_kernel(Plan a, SelectiveScanBackward bwd, BackwardWorkspace s) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<GradientsShared<T>*>(memory);
  const LaneState<T> lane(a);
  const WarpSum<T> channels;
  const View views[] = {a.p.u, a.p.delta, a.p.z, bwd.dy};
  TileLoader<T, 4> feed{shared.feed, lane, a.aligned, views};
  const int last = (lane.steps - 1) / kTile * kTile, own = threadIdx.x;
  feed.start(last);
  const Column<T> dus = lane.kept_column(bwd.du), ddeltas = lane.kept_column(bwd.ddelta);
  const bool gated = a.p.z.data;
  float dD = 0, dbias = 0;
  for (int n = 0; n < kStates; ++n) {
    shared.rates[n][own] = static_cast<const float*>(a.p.A)[lane.d * kStates + n];
    shared.G[n][own] = s.ends[lane.row(a.chunks, lane.chunk) * kStates + n];
    shared.dA[n][own] = 0;
  }
  for (int tile = last; tile >= 0; tile -= kTile) {
    feed.finish();
    if (tile > 0) {
      feed.start(tile - kTile);
      s.prefetch(a, lane, tile - kTile);
    }
#pragma unroll 1
    for (int sub = kTile - kSub; sub >= 0; sub -= kSub) {
      if (tile + sub >= lane.steps) continue;
      const float* start = s.sub(a, lane, tile + sub);
      float step[kSub], x[kSub], dout[kSub], dx[kSub] = {}, dstep[kSub] = {}, next_S[kGroup];
#pragma unroll
      for (int k = 0; k < kGroup; ++k) next_S[k] = start[k * a.p.channels];
#pragma unroll
      for (int i = 0; i < kSub; ++i) {
        const bool exists = tile + sub + i < lane.steps;
        const float u = feed.get(0, sub + i), dy = exists ? feed.get(3, sub + i) : 0.f;
        step[i] = lane.step_size(feed.get(1, sub + i), exists);
        x[i] = step[i] * u;
        dout[i] = gated ? dy * SiluGate(feed.get(2, sub + i)).value : dy;
        dD += dout[i] * u;
      }
      float dB[4] = {};  // (kSub steps × 2 states) × pairs of states, spread over the warp
#pragma unroll 1
      for (int first = 0; first < kStates; first += kGroup) {
        float decay[kSub][kGroup], kept[kSub][kGroup], G[kGroup], rate[kGroup], sum[kGroup],
            product[kGroup / 2][2 * kSub];
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {
          G[k] = shared.G[first + k][own];
          rate[k] = shared.rates[first + k][own];
          sum[k] = shared.dA[first + k][own];
          float S = next_S[k];
          next_S[k] = start[(first + kGroup + k) % kStates * a.p.channels];
#pragma unroll
          for (int i = 0; i < kSub; ++i) {
            decay[i][k] = ex2_approx(step[i] * (rate[k] * kLog2e));
            kept[i][k] = decay[i][k] * S;
            S = kept[i][k] + x[i] * shared.feed.B[sub + i][first + k];
          }
        }
#pragma unroll
        for (int i = kSub - 1; i >= 0; --i) {
#pragma unroll
          for (int k = 0; k < kGroup; ++k) {
            G[k] += dout[i] * shared.feed.C[sub + i][first + k];
            product[k / 2][2 * i + k % 2] = G[k] * x[i];
            dx[i] += G[k] * shared.feed.B[sub + i][first + k];
            const float through = G[k] * kept[i][k];
            dstep[i] += through * rate[k];
            sum[k] += through * step[i];
            G[k] *= decay[i][k];
          }
        }
#pragma unroll
        for (int k = 0; k < kGroup / 2; ++k) channels.add(dB, first / 2 + k, product[k]);
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {
          shared.G[first + k][own] = G[k];
          shared.dA[first + k][own] = sum[k];
        }
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int row = channels.row(k);
        shared.parts[own / 32][sub + row / 2][channels.column(k) * 2 + row % 2] = dB[k];
      }
#pragma unroll
      for (int i = 0; i < kSub; ++i) {
        const int t = tile + sub + i;
        lane.store(dus, t, lane.D * dout[i] + step[i] * dx[i]);
        float draw = dstep[i] + feed.get(0, sub + i) * dx[i];
        if (a.p.delta_softplus) draw *= softplus_slope<T>(step[i]);
        lane.store(ddeltas, t, draw);
        dbias += t < lane.steps ? draw : 0.f;
      }
    }
    __syncthreads();
    store_parts(s.dB, shared.parts, lane, tile);
  }
  if (!lane.live) return;
  const int64_t row = lane.row(a.chunks, lane.chunk);
  for (int n = 0; n < kStates; ++n) s.dA[row * kStates + n] = shared.dA[n][own];
  s.dD[row] = dD;
  s.dbias[row] = dbias;
}

template <class T>
void forward(const SelectiveScanForward& p, void* workspace, Stream stream) {
  const Plan a(p, sizeof(T), {p.u, p.delta, p.z});
  const auto s = workspace_at<ForwardWorkspace>(workspace, a);
  float* starts = p.chunk_states ? static_cast<float*>(p.chunk_states) : s.starts;
  if (a.chunks > 1)
    launch_kernel(local_states_kernel<T>, a.blocks(), kThreads, 0, stream, a, starts, s.steps);
  launch_threads(carry_states_kernel, p.batch * p.channels * kStates, 256, stream, a, starts,
                 s.steps);
  launch_kernel(outputs_kernel<T>, a.blocks(), kThreads, 0, stream, a, starts);
}

template <class T>
void backward(const SelectiveScanBackward& bwd, void* workspace, Stream stream) {
  const SelectiveScanForward& p = bwd.forward;
  const Plan a(p, sizeof(T), {p.u, p.delta, p.z, bwd.dy});
  const auto s = workspace_at<BackwardWorkspace>(workspace, a);
  launch_kernel(local_gradients_kernel<T>, a.blocks(), kThreads, sizeof(LocalGradientsShared<T>),
                stream, a, bwd, s);
  launch_threads(carry_gradients_kernel, p.batch * p.channels * kStates, 256, stream, a, bwd, s);
  launch_kernel(gradients_kernel<T>, a.blocks(), kThreads, sizeof(GradientsShared<T>), stream, a,
                bwd, s);
  const int64_t inputs = p.batch * p.time * p.groups * kStates, rows = p.batch * a.chunks;
  sum_rows(s.dB, bwd.dB, a.group_tiles, inputs, stream);
  sum_rows(s.dC, bwd.dC, a.group_tiles, inputs, stream);
  sum_rows(s.dA, bwd.dA, rows, p.channels * kStates, stream);
  sum_rows(s.dD, bwd.dD, rows, p.channels, stream);
  sum_rows(s.dbias, bwd.ddelta_bias, rows, p.channels, stream);
}

}  // namespace assay::ops::cuda::n16
