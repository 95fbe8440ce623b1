// The backward: states again, with dz, dq and what each chunk's outputs ask of its first state; a
// scan over the chunks, backwards; then dx, ddelta, dk and drate. The exact update walks the whole
// sequence in that last pass.
#include "ops/cuda/math.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/token_scan/cuda_tiles.cuh"

namespace assay::ops::cuda {
namespace token {

namespace {

struct BackwardWorkspace {
  float *tokens, *products, *ends;  // packed; decay of each chunk; gradient of the state after it
  float* subs;                      // [B, ⌈T / kSub⌉, Dm, states] state before each kSub steps
  float *dk, *dq, *drate;           // [tiles, B, T, states]
  float *dD, *dbias;                // [B, chunks, Dm]
  BackwardWorkspace(const Plan& a, WorkspaceArena& arena) {
    const bool exact = a.p.update == Update::exact;
    const int64_t sums = a.tiles * a.p.batch * a.p.time * a.states, rows = a.p.batch * a.p.channels;
    tokens = arena.take<float>(a.token_numbers());
    products = arena.take<float>(exact ? 0 : a.chunk_numbers());
    ends = arena.take<float>(exact ? 0 : a.chunk_numbers());
    subs = arena.take<float>(rows * ceil_div(a.p.time, kSub) * a.states);
    dk = arena.take<float>(sums);
    dq = arena.take<float>(sums);
    drate = arena.take<float>(a.p.update == Update::decay ? sums : 0);
    dD = arena.take<float>(rows * a.chunks);
    dbias = arena.take<float>(rows * a.chunks);
  }
  // This thread's states before step t of its stretch.
  template <int kLanes>
  __device__ float* sub(const LaneState<kLanes>& lane, int t) const {
    return subs + lane.states(ceil_div(lane.a.p.time, int64_t{kSub}), (lane.begin + t) / kSub);
  }
};

// Sums over the channels of a block: over a warp by shuffles, each of which halves what a lane
// still holds; then, tile by tile, over the warps.
template <int kLanes>
struct Sums : Shape<kLanes> {
  static constexpr int kTileSize = kTile * Sums::kStates,
                       kBytes = kWarps * kTileSize * int(sizeof(float));
  const LaneState<kLanes>& lane;
  float* parts;  // [kWarps, kTile, kStates]
  __device__ Sums(const LaneState<kLanes>& lane, void* parts)
      : lane(lane), parts(static_cast<float*>(parts)) {}

  template <int kLeft>
  __device__ static void halve(Eight& x, int mask) {
    const bool upper = threadIdx.x & mask;
#pragma unroll
    for (int n = 0; n < kLeft; ++n) {
      const float given = upper ? x[n] : x[n + kLeft], kept = upper ? x[n + kLeft] : x[n];
      x[n] = kept + __shfl_xor_sync(~0u, given, mask);
    }
  }
  // Every lane of the warp calls it, for the same step of the tile.
  __device__ void add(int step, Eight x) const {
    static_assert(kLanes == 2 || kLanes == 8);
    const int in_warp = threadIdx.x % 32, first = in_warp / 16 * 4 + in_warp / 8 % 2 * 2;
    halve<4>(x, 16);
    halve<2>(x, 8);
    float* out =
        parts + threadIdx.x / 32 * kTileSize + step * Sums::kStates + lane.part * kPerLane + first;
    if constexpr (kLanes == 8) {
      out[0] = x[0];
      out[1] = x[1];
    } else {
      halve<1>(x, 4);
      const float sum = x[0] + __shfl_xor_sync(~0u, x[0], 2);
      if (in_warp % 4 < 2) out[in_warp / 4 % 2] = sum;
    }
  }
  // Into [tiles, B, T, states]; after a barrier; no thread adds before the next one.
  __device__ void write(float* sums, int tile) const {
    const Plan& a = lane.a;
    const int64_t row = (lane.tile * a.p.batch + lane.b) * a.p.time + lane.begin + tile;
    for (int i = threadIdx.x; i < min(kTile, lane.steps - tile) * Sums::kStates; i += kThreads) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += parts[w * kTileSize + i];
      sums[row * Sums::kStates + i] = sum;
    }
  }
};

template <class T, Update kUpdate, int kLanes>
__global__ void __launch_bounds__(kThreads)
    states_kernel(Plan a, TokenScanBackward bwd, BackwardWorkspace s) {
  extern __shared__ __align__(16) char memory[];
  const LaneState<kLanes> lane(a, false);
  const View views[] = {a.p.x, a.p.delta, a.p.z, bwd.dy};
  TileLoader<T, 4, kLanes> feed(lane, views, s.tokens, memory);
  const Sums<kLanes> sums(lane, memory + TileLoader<T, 4, kLanes>::kBytes);
  feed.start(0);
  T* dz = lane.template at<T>(bwd.dz, 0);
  const bool gated = a.p.z.data;
  Eight S = load(a.p.chunk_states + lane.states(a.chunks, lane.chunk)), P, H = {};
#pragma unroll
  for (float& x : P.at) x = 1;
  if (!lane.live) S = {};
  for (int tile = 0; tile < lane.steps; tile += kTile) {
    feed.finish();
    feed.start(tile + kTile);
#pragma unroll 4
    for (int i = 0; i < kTile; ++i) {
      const bool exists = tile + i < lane.steps;
      if (i % kSub == 0 && exists && lane.live) store(s.sub(lane, tile + i), S);
      const float x = feed.get(0, i), dy = exists ? feed.get(3, i) : 0.f;
      const Token& token = feed.token(i);
      const float step = step_size<T, kUpdate>(a, feed.get(1, i) + lane.bias, token.square, exists);
      const SiluGate gate(gated ? feed.get(2, i) : 0.f);
      const float dout = gated ? dy * gate.value : dy;
      const Eight query = token.q;
      if constexpr (kUpdate == Update::exact) {
        advance_exact<kLanes>(S, step, x, token.k);
      } else {
        const Eight k = token.k, rate = token.rate;
#pragma unroll
        for (int n = 0; n < kPerLane; ++n) {
          const float factor = decay<kUpdate>(step, rate[n]);
          S[n] = factor * S[n] + step * x * k[n];
          P[n] *= factor;
          H[n] += P[n] * (query[n] * dout);
        }
      }
      Eight product;
#pragma unroll
      for (int n = 0; n < kPerLane; ++n) product[n] = S[n] * dout;
      sums.add(i, product);
      if (gated) {
        const float out = lane.over_parts(dot(S, query)) + lane.D * x;
        if (lane.first && exists) *dz = from_compute<T>(dy * out * gate.slope);
        dz += bwd.dz.time_stride;
      }
    }
    __syncthreads();
    sums.write(s.dq, tile);
  }
  if (kUpdate == Update::exact || !lane.live) return;
  store(s.ends + lane.states(a.chunks, lane.chunk), H);
  store(s.products + lane.states(a.chunks, lane.chunk), P);
}

// What the loss asks of one step, given G, the gradient of the state after it. G becomes that of
// the state before it.
struct Asked {
  float dx, dstep;
  Eight dk, drate;
};
template <Update kUpdate, int kLanes>
__device__ Asked step_back(Eight& G, const Eight& S, float step, float x, float rest,
                           const Eight& k, const Eight& rate) {
  Asked out{};
  float through_write = 0, through_step = 0;
  if constexpr (kUpdate == Update::exact) {
    through_write = LaneState<kLanes>::over_parts(dot(G, k));  // the gradient of p (x − S k)
    out.dstep = through_write * rest;
    const float held = step * through_write, norm = -2 * out.dstep * step * step;
#pragma unroll
    for (int n = 0; n < kPerLane; ++n) {
      out.dk[n] = step * rest * G[n] - held * S[n] + norm * k[n];
      G[n] -= held * k[n];
    }
  } else {
    Eight factor, through;
#pragma unroll
    for (int n = 0; n < kPerLane; ++n) {
      factor[n] = decay<kUpdate>(step, rate[n]);
      through[n] = G[n] * S[n];                               // the gradient of the decay
      if (kUpdate == Update::decay) through[n] *= factor[n];  // of its exponent
      through_write += G[n] * k[n];
      through_step += through[n] * rate[n];
    }
    through_write = LaneState<kLanes>::over_parts(through_write);
    through_step = LaneState<kLanes>::over_parts(through_step);
    out.dstep = x * through_write + (kUpdate == Update::decay ? kLn2 : -1.f) * through_step;
    const float norm = -2 * out.dstep * step * step;
#pragma unroll
    for (int n = 0; n < kPerLane; ++n) {
      out.dk[n] = step * x * G[n];
      if (kUpdate == Update::decay) out.drate[n] = through[n] * step;
      // k² decays, and kᵀk shortens the step
      else out.dk[n] += k[n] * (norm - 2 * step * through[n]);
      G[n] *= factor[n];
    }
  }
  out.dx = step * through_write;
  return out;
}

template <class T, Update kUpdate, int kLanes>
__global__ void __launch_bounds__(kThreads, kUpdate == Update::exact ? 2 : 3)
    gradients_kernel(Plan a, TokenScanBackward bwd, BackwardWorkspace s) {
  extern __shared__ __align__(16) char memory[];
  constexpr bool kSequential = kUpdate == Update::exact;
  const LaneState<kLanes> lane(a, kSequential);
  const View views[] = {a.p.x, a.p.delta, a.p.z, bwd.dy};
  TileLoader<T, 4, kLanes> feed(lane, views, s.tokens, memory);
  const Sums<kLanes> keys(lane, memory + TileLoader<T, 4, kLanes>::kBytes);
  const Sums<kLanes> rates(lane,
                           keys.parts + (kUpdate == Update::decay ? kWarps * keys.kTileSize : 0));
  const int last = (lane.steps - 1) / kTile * kTile;
  feed.start(last);
  T *dx = lane.template at<T>(bwd.dx, last + kTile - 1),
    *ddelta = lane.template at<T>(bwd.ddelta, last + kTile - 1);
  const bool gated = a.p.z.data;
  float dD = 0, dbias = 0;
  Eight G = kSequential ? lane.read_state(bwd.dfinal_state)
                        : load(s.ends + lane.states(a.chunks, lane.chunk));
  Eight next = load(s.sub(lane, (lane.steps - 1) / kSub * kSub));
  if (!lane.live) G = next = {};
  for (int tile = last; tile >= 0; tile -= kTile) {
    feed.finish();
    if (tile > 0) feed.start(tile - kTile);
#pragma unroll 1
    for (int sub = kTile - kSub; sub >= 0; sub -= kSub) {
      if (tile + sub >= lane.steps) {
        dx -= kSub * bwd.dx.time_stride;
        ddelta -= kSub * bwd.ddelta.time_stride;
        continue;
      }
      Eight S[kSub];  // before each step
      float step[kSub], dout[kSub], rest[kSub], dxs[kSub], dsteps[kSub];
      S[0] = next;
#pragma unroll
      for (int i = 0; i < kSub; ++i) {
        const bool exists = tile + sub + i < lane.steps;
        const float dy = exists ? feed.get(3, sub + i) : 0.f;
        step[i] = step_size<T, kUpdate>(a, feed.get(1, sub + i) + lane.bias,
                                        feed.token(sub + i).square, exists);
        dout[i] = gated ? dy * SiluGate(feed.get(2, sub + i)).value : dy;
      }
#pragma unroll
      for (int i = 0; i < kSub; ++i) {
        Eight after = S[i];
        rest[i] =
            advance<kUpdate, kLanes>(after, step[i], feed.get(0, sub + i), feed.token(sub + i));
        if (i + 1 < kSub) S[i + 1] = after;
      }
      if (tile + sub > 0) next = lane.live ? load(s.sub(lane, tile + sub - kSub)) : Eight{};
#pragma unroll
      for (int i = kSub - 1; i >= 0; --i) {
        const Token& token = feed.token(sub + i);
        const Eight query = token.q;
#pragma unroll
        for (int n = 0; n < kPerLane; ++n) G[n] += dout[i] * query[n];
        const Asked asked = step_back<kUpdate, kLanes>(G, S[i], step[i], feed.get(0, sub + i),
                                                       rest[i], token.k, token.rate);
        keys.add(sub + i, asked.dk);
        if constexpr (kUpdate == Update::decay) rates.add(sub + i, asked.drate);
        dxs[i] = asked.dx;
        dsteps[i] = asked.dstep;
      }
#pragma unroll
      for (int i = kSub - 1; i >= 0; --i) {
        const bool exists = tile + sub + i < lane.steps;
        const float raw = feed.get(1, sub + i) + lane.bias;
        const float slope = step_slope<T, kUpdate>(a, raw, step[i], feed.token(sub + i).square);
        const float draw = exists ? dsteps[i] * slope : 0.f;
        dD += dout[i] * feed.get(0, sub + i);
        dbias += draw;
        if (lane.first && exists) {
          *dx = from_compute<T>(dxs[i] + lane.D * dout[i]);
          *ddelta = from_compute<T>(draw);
        }
        dx -= bwd.dx.time_stride;
        ddelta -= bwd.ddelta.time_stride;
      }
    }
    __syncthreads();
    keys.write(s.dk, tile);
    if constexpr (kUpdate == Update::decay) rates.write(s.drate, tile);
  }
  if (kSequential && bwd.dinitial_state) lane.write_state(bwd.dinitial_state, G);
  if (!lane.first) return;
  s.dD[lane.channels(kSequential ? 1 : a.chunks, lane.chunk)] = dD;
  s.dbias[lane.channels(kSequential ? 1 : a.chunks, lane.chunk)] = dbias;
}

// out[row, n] = Σ_tile sums[tile, row, n], in the order of the tiles, n < N.
__global__ void __launch_bounds__(256) sum_tiles_kernel(Plan a, const float* sums, float* out) {
  const int64_t rows = a.p.batch * a.p.time, i = blockIdx.x * int64_t{256} + threadIdx.x;
  if (i >= rows * a.p.state_size) return;
  const int64_t row = i / a.p.state_size, n = i % a.p.state_size;
  float sum = 0;
#pragma unroll 4
  for (int64_t tile = 0; tile < a.tiles; ++tile) sum += sums[(tile * rows + row) * a.states + n];
  out[i] = sum;
}

template <class T, Update kUpdate, int kLanes>
void run(const Plan& a, const TokenScanBackward& bwd, const BackwardWorkspace& s, Stream stream) {
  constexpr bool kSequential = kUpdate == Update::exact;
  constexpr int kBytes = TileLoader<T, 4, kLanes>::kBytes + Sums<kLanes>::kBytes;
  launch_kernel(states_kernel<T, kUpdate, kLanes>, a.blocks(false), kThreads, kBytes, stream, a,
                bwd, s);
  if (!kSequential)
    carry(a, s.ends, s.products, bwd.dfinal_state, bwd.dinitial_state, true, stream);
  launch_kernel(gradients_kernel<T, kUpdate, kLanes>, a.blocks(kSequential), kThreads,
                kBytes + (kUpdate == Update::decay ? Sums<kLanes>::kBytes : 0), stream, a, bwd, s);
}

}  // namespace
}  // namespace token

size_t workspace_bytes(const TokenScanBackward& bwd) {
  return workspace_size<token::BackwardWorkspace>(token::Plan(bwd.forward));
}

void token_scan(const TokenScanBackward& bwd, void* workspace, Stream stream) {
  const TokenScanForward& p = bwd.forward;
  token::check(p);
  const token::Plan a(p, p.dtype == DType::bf16 ? 2 : 4, {p.x, p.delta, p.z, bwd.dy});
  const auto s = workspace_at<token::BackwardWorkspace>(workspace, a);
  token::pack(a, s.tokens, stream);
  token::with_shape(p, [&]<class T>(T, auto update, auto lanes) {
    token::run<T, update, lanes>(a, bwd, s, stream);
  });
  const int64_t numbers = p.batch * p.time * p.state_size;
  for (const auto& [sums, out] : {std::pair{s.dk, bwd.dk}, {s.dq, bwd.dq}, {s.drate, bwd.drate}})
    if (out) launch_threads(token::sum_tiles_kernel, numbers, 256, stream, a, sums, out);
  const int64_t rows = p.batch * (p.update == Update::exact ? 1 : a.chunks);
  sum_rows(s.dD, bwd.dD, rows, p.channels, stream);
  sum_rows(s.dbias, bwd.ddelta_bias, rows, p.channels, stream);
}

}  // namespace assay::ops::cuda
