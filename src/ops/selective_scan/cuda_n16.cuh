#pragma once
// Selective scan for 16 states, fp32 and bf16: time is cut into chunks that run at once. README.md counts it.
//   forward:  local_states (each chunk from 0) → carry_states (over the chunks) → outputs
//   backward: local_gradients (states again, dz, dC, and what each chunk's outputs ask of its first state)
//             → carry_gradients (over the chunks, backwards) → gradients (du, ddelta, dB, dA) → sums
// A thread is a channel: sums over states stay in the thread. Sums over channels go through the tensor cores.
#include <cstdint>

#include "ops/cuda.cuh"
#include "ops/selective_scan/cuda_math.cuh"
#include "ops/selective_scan/kernel.h"

namespace assay::ops::cuda::n16 {

constexpr int kStates = 16;
constexpr int kThreads = 128;  // channels of a block
constexpr int kWarps = kThreads / 32;
constexpr int kTile = 32;      // steps whose B and C a block holds in shared memory
constexpr int kSub = 8;        // steps whose states a thread of `gradients` holds in registers, kGroup states at a time
constexpr int kGroup = 4;
constexpr int kAhead = 8;      // steps loaded together
constexpr int64_t kMaxStride = int64_t{1} << 29;  // of time, in elements: in bytes it has to fit 32 bits

// Longer chunks mean fewer states to store and carry; but there must be enough blocks to fill the chip a few times.
inline int64_t chunk_size(const SelectiveScanForward& p) {
  const int64_t tiles = p.batch * p.groups * ceil_div(p.channels / p.groups, kThreads);
  for (int64_t chunk = 256; chunk > kTile; chunk /= 2)
    if (tiles * ceil_div(p.time, chunk) >= 3000) return chunk;
  return kTile;
}

// The call, and how it is cut.
struct Plan {
  SelectiveScanForward p;
  int64_t chunk, chunks, subs, group_width, group_tiles;
  explicit Plan(const SelectiveScanForward& p)
      : p(p), chunk(chunk_size(p)), chunks(ceil_div(p.time, chunk)), subs(chunks * (chunk / kSub)),
        group_width(p.channels / p.groups), group_tiles(ceil_div(group_width, kThreads)) {}
  unsigned blocks() const { return unsigned(p.batch * chunks * p.groups * group_tiles); }
};

struct ForwardScratch {
  float *starts, *steps;  // [B, chunks, Dm, N] where the caller keeps no chunk_states; [B, chunks, Dm] Σ Δ of a chunk
  ForwardScratch(const Plan& a, Arena& arena)
      : starts(arena.take<float>(a.p.batch * a.chunks * a.p.channels * kStates)),
        steps(arena.take<float>(a.p.batch * a.chunks * a.p.channels)) {}
};

struct BackwardScratch {
  float *steps;      // [B, chunks, Dm] Σ Δ of a chunk
  float *ends;       // [B, chunks, Dm, N] gradient of the state after a chunk
  float *subs;       // [B, subs, N, Dm] state before each kSub steps
  float *dB, *dC;    // [group_tiles, B, T, G, N]
  float *dA;         // [B, chunks, Dm, N]
  float *dD, *dbias; // [B, chunks, Dm]
  BackwardScratch(const Plan& a, Arena& arena) {
    const int64_t rows = a.p.batch * a.chunks * a.p.channels, sums = a.group_tiles * a.p.batch * a.p.time * a.p.groups * kStates;
    steps = arena.take<float>(rows), ends = arena.take<float>(rows * kStates);
    subs = arena.take<float>(a.p.batch * a.subs * a.p.channels * kStates);
    dB = arena.take<float>(sums), dC = arena.take<float>(sums);
    dA = arena.take<float>(rows * kStates), dD = arena.take<float>(rows), dbias = arena.take<float>(rows);
  }
};

// A channel of a chunk of a [B, T, Dm] tensor. One multiply-add makes an address.
template <class T>
struct Column {
  char* data;
  uint32_t stride;  // in bytes
  __device__ T& operator[](uint32_t t) const { return *reinterpret_cast<T*>(data + uint64_t{t} * stride); }
};

// What a thread owns: one channel of one chunk. Steps after the sequence's last, and threads after the group's last channel
// ("idle"), read numbers that exist, with Δ = 0 and dy = 0: nothing moves. They write nothing.
template <class T>
struct Lane {
  const SelectiveScanForward& p;
  int64_t b, group, group_tile, chunk, d, begin;
  int steps;  // of the chunk that lie in the sequence
  bool live;
  float bias, D;

  __device__ explicit Lane(const Plan& a) : p(a.p) {
    int64_t i = blockIdx.x;
    group_tile = i % a.group_tiles, i /= a.group_tiles;
    group = i % p.groups, i /= p.groups;
    chunk = i % a.chunks, b = i / a.chunks;
    const int64_t within = group_tile * kThreads + threadIdx.x;
    live = within < a.group_width;
    d = group * a.group_width + (live ? within : 0);
    begin = chunk * a.chunk;
    steps = int(min(a.chunk, p.time - begin));
    bias = p.delta_bias ? static_cast<const float*>(p.delta_bias)[d] : 0.f;
    D = p.D ? static_cast<const float*>(p.D)[d] : 0.f;
  }
  __device__ Column<T> column(const View& v) const { return column(v, d); }
  __device__ Column<T> column(const View& v, int64_t i) const {
    T* data = static_cast<T*>(v.data) + b * v.batch_stride + begin * v.time_stride + i;
    return {reinterpret_cast<char*>(data), uint32_t(v.time_stride * sizeof(T))};
  }
  __device__ bool has(int t) const { return live && t < steps; }
  template <int kCount>
  __device__ void load(float (&out)[kCount], const Column<T>& in, int t) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] = real(in[min(t + i, steps - 1)]);
  }
  template <int kCount>
  __device__ void load_steps(float (&out)[kCount], const Column<T>& delta, int t) const {
    load(out, delta, t);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float x = out[i] + bias, y = p.delta_softplus ? softplus<T>(x) : x;
      out[i] = has(t + i) ? y : 0.f;
    }
  }
  template <int kCount>
  __device__ void load_dys(float (&out)[kCount], const Column<T>& dy, int t) const {
    load(out, dy, t);
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] = has(t + i) ? out[i] : 0.f;
  }
  // silu(z) and its derivative; 1 and 0 without z.
  template <int kCount>
  __device__ void load_gates(float (&gate)[kCount], float (&slope)[kCount], const Column<T>& z, int t) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) gate[i] = 1, slope[i] = 0;
    if (!p.z.data) return;
    load(gate, z, t);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float s = sigmoid(gate[i]);
      slope[i] = s * (1 + gate[i] * (1 - s));
      gate[i] *= s;
    }
  }
  __device__ void store(const Column<T>& out, int t, float x) const {
    if (has(t)) out[t] = stored<T>(x);
  }
  __device__ void decay_rates(float (&A)[kStates]) const {  // exp(Δ A) = 2^(Δ A log2 e)
#pragma unroll
    for (int n = 0; n < kStates; ++n) A[n] = static_cast<const float*>(p.A)[d * kStates + n] * kLog2e;
  }
  // Offset of this channel in a [B, rows, Dm] tensor.
  __device__ int64_t row(int64_t rows, int64_t i) const { return (b * rows + i) * p.channels + d; }
};

__device__ inline void load_states(float (&S)[kStates], const float* in) {
#pragma unroll
  for (int n = 0; n < kStates; ++n) S[n] = in[n];
}
__device__ inline void store_states(float* out, const float (&S)[kStates]) {
#pragma unroll
  for (int n = 0; n < kStates; ++n) out[n] = S[n];
}

// B or C of kTile steps of this block's group; 0 after the last step.
using Inputs = float[kTile][kStates];
template <class T>
__device__ void load_tile(Inputs& out, const Lane<T>& lane, const View& v, int t) {
  const int n = threadIdx.x % kStates;
  const Column<T> in = lane.column(v, lane.group * kStates + n);
#pragma unroll
  for (int i = threadIdx.x / kStates; i < kTile; i += kThreads / kStates)
    out[i][n] = t + i < lane.steps ? real(in[t + i]) : 0.f;
}

// Sums over the block's warps; every channel of the block is in it then.
using Parts = float[kWarps][kTile][kStates + 1];
template <class T>
__device__ void store_tile(float* out, const Parts& parts, const Plan& a, const Lane<T>& lane, int tile) {
  for (int i = threadIdx.x; i < kTile * kStates; i += kThreads) {
    const int t = i / kStates, n = i % kStates;
    if (tile + t >= lane.steps) break;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += parts[w][t][n];
    const int64_t row = (lane.group_tile * a.p.batch + lane.b) * a.p.time + lane.begin + tile + t;
    out[(row * a.p.groups + lane.group) * kStates + n] = sum;
  }
}

// The state that each chunk but the last adds to what it was given.
template <class T>
__global__ void __launch_bounds__(kThreads) local_states_kernel(Plan a, float* starts, float* sums) {
  __shared__ Inputs B;
  const Lane<T> lane(a);
  if (lane.chunk + 1 == a.chunks) return;
  const Column<T> us = lane.column(a.p.u), deltas = lane.column(a.p.delta);
  float S[kStates] = {}, A[kStates], sum = 0;
  lane.decay_rates(A);
  for (int tile = 0; tile < lane.steps; tile += kTile) {
    __syncthreads();
    load_tile(B, lane, a.p.B, tile);
    __syncthreads();
#pragma unroll 1
    for (int t = 0; t < kTile; t += kAhead) {
      float u[kAhead], step[kAhead];
      lane.load(u, us, tile + t);
      lane.load_steps(step, deltas, tile + t);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const float x = step[i] * u[i];
        sum += step[i];
#pragma unroll
        for (int n = 0; n < kStates; ++n) S[n] = exp2_fast(step[i] * A[n]) * S[n] + x * B[t + i][n];
      }
    }
  }
  if (!lane.live) return;
  store_states(starts + lane.row(a.chunks, lane.chunk + 1) * kStates, S);
  sums[lane.row(a.chunks, lane.chunk)] = sum;
}

// A thread is a state here. starts[c + 1], which holds what chunk c adds, becomes the state before chunk c + 1.
__global__ void __launch_bounds__(256) carry_states_kernel(Plan a, float* starts, const float* sums) {
  const int64_t states = a.p.channels * kStates, i = blockIdx.x * int64_t{256} + threadIdx.x;
  if (i >= a.p.batch * states) return;
  const int64_t b = i / states, state = i % states;
  const float A = static_cast<const float*>(a.p.A)[state] * kLog2e;
  float* S = starts + b * a.chunks * states + state;
  const float* sum = sums + b * a.chunks * a.p.channels + state / kStates;
  float carried = a.p.initial_state ? static_cast<const float*>(a.p.initial_state)[i] : 0.f;
  S[0] = carried;
  for (int64_t c = 0; c + 1 < a.chunks; c += kAhead) {
    float added[kAhead], decay[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const bool has = c + k + 1 < a.chunks;
      added[k] = has ? S[(c + k + 1) * states] : 0.f;
      decay[k] = has ? exp2_fast(A * sum[(c + k) * a.p.channels]) : 1.f;
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      carried = decay[k] * carried + added[k];
      if (c + k + 1 < a.chunks) S[(c + k + 1) * states] = carried;
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) outputs_kernel(Plan a, const float* starts) {
  __shared__ Inputs B, C;
  const Lane<T> lane(a);
  const Column<T> us = lane.column(a.p.u), deltas = lane.column(a.p.delta), zs = lane.column(a.p.z), ys = lane.column(a.p.y);
  float S[kStates], A[kStates];
  load_states(S, starts + lane.row(a.chunks, lane.chunk) * kStates);
  lane.decay_rates(A);
  for (int tile = 0; tile < lane.steps; tile += kTile) {
    __syncthreads();
    load_tile(B, lane, a.p.B, tile);
    load_tile(C, lane, a.p.C, tile);
    __syncthreads();
#pragma unroll 1
    for (int t = 0; t < kTile; t += kAhead) {
      float u[kAhead], step[kAhead], gate[kAhead], slope[kAhead];
      lane.load(u, us, tile + t);
      lane.load_steps(step, deltas, tile + t);
      lane.load_gates(gate, slope, zs, tile + t);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const float x = step[i] * u[i];
        float y[2] = {lane.D * u[i], 0};
#pragma unroll
        for (int n = 0; n < kStates; ++n) {
          S[n] = exp2_fast(step[i] * A[n]) * S[n] + x * B[t + i][n];
          y[n % 2] += S[n] * C[t + i][n];
        }
        lane.store(ys, tile + t + i, (y[0] + y[1]) * gate[i]);
      }
    }
  }
  if (lane.live && lane.chunk + 1 == a.chunks)
    store_states(static_cast<float*>(a.p.final_state) + lane.row(1, 0) * kStates, S);
}

// The state again, from each chunk's start, and with it y for dz, and dC. H becomes the gradient of the chunk's first state
// from the chunk's own outputs: Σ_t P_t C_t dout_t, P_t the product of the decays from the chunk's begin to t.
template <class T>
__global__ void __launch_bounds__(kThreads, 3) local_gradients_kernel(Plan a, SelectiveScanBackward q, BackwardScratch s) {
  __shared__ Inputs B, C;
  __shared__ Parts parts;
  const Lane<T> lane(a);
  const WarpSum<T> channels;
  const Column<T> us = lane.column(a.p.u), deltas = lane.column(a.p.delta), zs = lane.column(a.p.z), dys = lane.column(q.dy),
                  dzs = lane.column(q.dz);
  float S[kStates], A[kStates], P[kStates], H[kStates] = {}, sum = 0;
  load_states(S, static_cast<const float*>(a.p.chunk_states) + lane.row(a.chunks, lane.chunk) * kStates);
  lane.decay_rates(A);
  for (float& x : P) x = 1;
  for (int tile = 0; tile < lane.steps; tile += kTile) {
    load_tile(B, lane, a.p.B, tile);
    load_tile(C, lane, a.p.C, tile);
    __syncthreads();
#pragma unroll 1
    for (int t = 0; t < kTile; t += kAhead) {
      if (lane.live && t % kSub == 0) {
        float* out = s.subs + (lane.b * a.subs + (lane.begin + tile + t) / kSub) * kStates * a.p.channels + lane.d;
#pragma unroll
        for (int n = 0; n < kStates; ++n) out[n * a.p.channels] = S[n];
      }
      float u[kAhead], step[kAhead], gate[kAhead], slope[kAhead], dy[kAhead];
      lane.load(u, us, tile + t);
      lane.load_steps(step, deltas, tile + t);
      lane.load_dys(dy, dys, tile + t);
      lane.load_gates(gate, slope, zs, tile + t);
      float dC[4] = {};  // states × kAhead steps, spread over the warp
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const float x = step[i] * u[i], dout = dy[i] * gate[i];
        float y = lane.D * u[i], product[kStates];
        sum += step[i];
#pragma unroll
        for (int n = 0; n < kStates; ++n) {
          const float decay = exp2_fast(step[i] * A[n]);
          S[n] = decay * S[n] + x * B[t + i][n];
          y += S[n] * C[t + i][n];
          P[n] *= decay;
          H[n] += P[n] * (C[t + i][n] * dout);
          product[n] = S[n] * dout;
        }
        if (a.p.z.data) lane.store(dzs, tile + t + i, dy[i] * y * slope[i]);
        channels.add(dC, i, product);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) parts[threadIdx.x / 32][t + channels.column(k)][channels.row(k)] = dC[k];
    }
    __syncthreads();
    store_tile(s.dC, parts, a, lane, tile);
  }
  if (!lane.live) return;
  s.steps[lane.row(a.chunks, lane.chunk)] = sum;
  store_states(s.ends + lane.row(a.chunks, lane.chunk) * kStates, H);
}

// A thread is a state here. ends[c], which holds H of chunk c, becomes the gradient of the state after chunk c.
__global__ void __launch_bounds__(256) carry_gradients_kernel(Plan a, SelectiveScanBackward q, BackwardScratch s) {
  const int64_t states = a.p.channels * kStates, i = blockIdx.x * int64_t{256} + threadIdx.x;
  if (i >= a.p.batch * states) return;
  const int64_t b = i / states, state = i % states;
  const float A = static_cast<const float*>(a.p.A)[state] * kLog2e;
  float* G = s.ends + b * a.chunks * states + state;
  const float* sum = s.steps + b * a.chunks * a.p.channels + state / kStates;
  float carried = q.dfinal_state ? static_cast<const float*>(q.dfinal_state)[i] : 0.f;
  for (int64_t c = a.chunks - 1; c >= 0; c -= kAhead) {
    float added[kAhead], decay[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      added[k] = c >= k ? G[(c - k) * states] : 0.f;
      decay[k] = c >= k ? exp2_fast(A * sum[(c - k) * a.p.channels]) : 1.f;
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (c >= k) G[(c - k) * states] = carried;
      carried = decay[k] * carried + added[k];
    }
  }
  if (q.dinitial_state) static_cast<float*>(q.dinitial_state)[i] = carried;
}

// Backwards through a chunk, kSub steps at a time, kGroup states at a time: first forwards from the stored state, the decays
// and what they keep of the state into registers, then back. G is the gradient of the state.
template <class T>
__global__ void __launch_bounds__(kThreads, 3) gradients_kernel(Plan a, SelectiveScanBackward q, BackwardScratch s) {
  __shared__ Inputs B, C;
  __shared__ Parts parts;
  __shared__ float rates[kStates][kThreads], gradient[kStates][kThreads], dA[kStates][kThreads];  // each thread its column
  const Lane<T> lane(a);
  const WarpSum<T> channels;
  const Column<T> us = lane.column(a.p.u), deltas = lane.column(a.p.delta), zs = lane.column(a.p.z), dys = lane.column(q.dy),
                  dus = lane.column(q.du), ddeltas = lane.column(q.ddelta);
  const int own = threadIdx.x;
  float dD = 0, dbias = 0;
  for (int n = 0; n < kStates; ++n) {
    rates[n][own] = static_cast<const float*>(a.p.A)[lane.d * kStates + n];
    gradient[n][own] = s.ends[lane.row(a.chunks, lane.chunk) * kStates + n];
    dA[n][own] = 0;
  }
  for (int tile = (lane.steps - 1) / kTile * kTile; tile >= 0; tile -= kTile) {
    load_tile(B, lane, a.p.B, tile);
    load_tile(C, lane, a.p.C, tile);
    __syncthreads();
#pragma unroll 1
    for (int sub = kTile - kSub; sub >= 0; sub -= kSub) {
      if (tile + sub >= lane.steps) continue;
      const float* start = s.subs + (lane.b * a.subs + (lane.begin + tile + sub) / kSub) * kStates * a.p.channels + lane.d;
      float step[kSub], x[kSub], dout[kSub], dx[kSub] = {}, dstep[kSub] = {};
      lane.load(x, us, tile + sub);
      lane.load_steps(step, deltas, tile + sub);
      lane.load_dys(dout, dys, tile + sub);
      {
        float gate[kSub], slope[kSub];
        lane.load_gates(gate, slope, zs, tile + sub);
#pragma unroll
        for (int i = 0; i < kSub; ++i) dout[i] *= gate[i], dD += dout[i] * x[i], x[i] *= step[i];
      }
      float dB[kSub / 8][4] = {};  // (8 steps × 2 states) × pairs of states, spread over the warp
#pragma unroll 1
      for (int first = 0; first < kStates; first += kGroup) {
        float decay[kSub][kGroup], kept[kSub][kGroup], G[kGroup], rate[kGroup], sum[kGroup];
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {
          G[k] = gradient[first + k][own], rate[k] = rates[first + k][own], sum[k] = dA[first + k][own];
          float S = start[(first + k) * a.p.channels];
#pragma unroll
          for (int i = 0; i < kSub; ++i) {
            decay[i][k] = exp2_fast(step[i] * (rate[k] * kLog2e));
            kept[i][k] = decay[i][k] * S;
            S = kept[i][k] + x[i] * B[sub + i][first + k];
          }
        }
#pragma unroll
        for (int eight = kSub / 8 - 1; eight >= 0; --eight) {
          float product[kGroup / 2][16];
#pragma unroll
          for (int j = 7; j >= 0; --j) {
            const int i = eight * 8 + j;
#pragma unroll
            for (int k = 0; k < kGroup; ++k) {
              G[k] += dout[i] * C[sub + i][first + k];
              product[k / 2][j * 2 + k % 2] = G[k] * x[i];
              dx[i] += G[k] * B[sub + i][first + k];
              const float through = G[k] * kept[i][k];
              dstep[i] += through * rate[k];
              sum[k] += through * step[i];
              G[k] *= decay[i][k];
            }
          }
#pragma unroll
          for (int k = 0; k < kGroup / 2; ++k) channels.add(dB[eight], first / 2 + k, product[k]);
        }
#pragma unroll
        for (int k = 0; k < kGroup; ++k) gradient[first + k][own] = G[k], dA[first + k][own] = sum[k];
      }
#pragma unroll
      for (int eight = 0; eight < kSub / 8; ++eight)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int row = channels.row(k);
          parts[own / 32][sub + eight * 8 + row / 2][channels.column(k) * 2 + row % 2] = dB[eight][k];
        }
      float u[kSub];
      lane.load(u, us, tile + sub);
#pragma unroll
      for (int i = 0; i < kSub; ++i) {
        lane.store(dus, tile + sub + i, lane.D * dout[i] + step[i] * dx[i]);
        float draw = dstep[i] + u[i] * dx[i];
        if (a.p.delta_softplus) draw *= softplus_slope<T>(step[i]);
        lane.store(ddeltas, tile + sub + i, draw);
        dbias += lane.has(tile + sub + i) ? draw : 0.f;
      }
    }
    __syncthreads();
    store_tile(s.dB, parts, a, lane, tile);
  }
  if (!lane.live) return;
  const int64_t row = lane.row(a.chunks, lane.chunk);
  for (int n = 0; n < kStates; ++n) s.dA[row * kStates + n] = dA[n][own];
  s.dD[row] = dD, s.dbias[row] = dbias;
}

template <class T>
void forward(const SelectiveScanForward& p, void* workspace, cudaStream_t stream) {
  const Plan a(p);
  Arena arena{static_cast<char*>(workspace)};
  const ForwardScratch s(a, arena);
  float* starts = p.chunk_states ? static_cast<float*>(p.chunk_states) : s.starts;
  if (a.chunks > 1) local_states_kernel<T><<<a.blocks(), kThreads, 0, stream>>>(a, starts, s.steps);
  carry_states_kernel<<<unsigned(ceil_div(p.batch * p.channels * kStates, 256)), 256, 0, stream>>>(a, starts, s.steps);
  outputs_kernel<T><<<a.blocks(), kThreads, 0, stream>>>(a, starts);
  check_launch("selective_scan forward");
}

template <class T>
void backward(const SelectiveScanBackward& q, void* workspace, cudaStream_t stream) {
  const SelectiveScanForward& p = q.forward;
  const Plan a(p);
  Arena arena{static_cast<char*>(workspace)};
  const BackwardScratch s(a, arena);
  local_gradients_kernel<T><<<a.blocks(), kThreads, 0, stream>>>(a, q, s);
  carry_gradients_kernel<<<unsigned(ceil_div(p.batch * p.channels * kStates, 256)), 256, 0, stream>>>(a, q, s);
  gradients_kernel<T><<<a.blocks(), kThreads, 0, stream>>>(a, q, s);
  check_launch("selective_scan backward");
  const int64_t inputs = p.batch * p.time * p.groups * kStates, rows = p.batch * a.chunks;
  sum_rows(s.dB, q.dB, a.group_tiles, inputs, stream);
  sum_rows(s.dC, q.dC, a.group_tiles, inputs, stream);
  sum_rows(s.dA, q.dA, rows, p.channels * kStates, stream);
  if (q.dD) sum_rows(s.dD, q.dD, rows, p.channels, stream);
  if (q.ddelta_bias) sum_rows(s.dbias, q.ddelta_bias, rows, p.channels, stream);
}

}  // namespace assay::ops::cuda::n16
