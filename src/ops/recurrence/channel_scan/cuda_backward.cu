// The backward: states again, with dz, dq and what each chunk's outputs ask of its first state; a
// scan over the chunks, backwards; then dx, ddelta, dk and drate. The exact update walks the whole
// sequence in that last pass.
#include "ops/recurrence/channel_scan/cuda_sums.cuh"

namespace assay::ops::cuda {
namespace token {
namespace {

struct BackwardWorkspace {
  // as in the forward; [B, chunks, Dm, states] gradient of the state after a chunk
  float* decays;
  float* ends;
  float* subs;  // [B, chunks · chunk / kSub, states, Dm] state before each kSub steps
  // [tiles, B, T, G, N]; drate of channels: [B, chunks, Dm, N]
  float* dk;
  float* dq;
  float* drate;
  // [B, chunks, Dm]
  float* dD;
  float* dbias;
  BackwardWorkspace(const Plan& plan, WorkspaceArena& arena) {
    const int64_t rows = plan.rows();
    const int64_t sums =
        plan.tiles * plan.args.batch * plan.args.time * plan.args.groups * plan.args.state_size;
    decays = arena.take<float>(plan.decay_numbers());
    ends = arena.take<float>(plan.rule == Rule::exact ? 0 : rows * plan.states);
    subs = arena.take<float>(rows * plan.chunk / kSub * plan.states);
    dk = arena.take<float>(sums);
    dq = arena.take<float>(sums);
    drate = arena.take<float>(plan.rule == Rule::token     ? sums
                              : plan.rule == Rule::channel ? rows * plan.args.state_size
                                                           : 0);
    dD = arena.take<float>(rows);
    dbias = arena.take<float>(rows);
  }
  // This thread's first state before step t of its stretch; the next is Dm numbers on.
  template <class T, class Shape>
  __device__ float* sub(const LaneState<T, Shape>& lane, int t) const {
    const Plan& plan = lane.plan;
    const int64_t row = (lane.b * plan.chunks * plan.chunk + lane.begin + t) / kSub;
    return subs + (row * Shape::kStates + lane.part * Shape::kPerLane) * plan.args.channels +
           lane.d;
  }
  template <int kCount, class T, class Shape>
  __device__ void load_sub(Vec<float, kCount>& S, const LaneState<T, Shape>& lane, int t) const {
    const float* from = sub(lane, t);
#pragma unroll
    for (int n = 0; n < kCount; ++n) S[n] = lane.live ? from[n * lane.plan.args.channels] : 0.f;
  }
  // Into L2 the states that the block needs for the tile from step t on: a line of 128
  // bytes a thread.
  template <class T, class Shape>
  __device__ void prefetch(const LaneState<T, Shape>& lane, int t) const {
    constexpr int kLines = Shape::kWidth / 32;
    static_assert(kTile / kSub * Shape::kStates * kLines == kThreads);
    const int line = threadIdx.x % kLines;
    const int row = threadIdx.x / kLines;
    const float* states =
        subs +
        ((lane.b * lane.plan.chunks * lane.plan.chunk + lane.begin + t) / kSub * Shape::kStates +
         row) *
            lane.plan.args.channels +
        lane.block;
    if (line * 32 < lane.width) prefetch_l2(states + line * 32);
  }
};

// The state again, from each chunk's start, and with it y for dz, and dq. H becomes the gradient of
// the chunk's first state from the chunk's own outputs: Σ_t P_t q_t dout_t, P_t the product of the
// decays from the chunk's begin to t.
template <class T, class Shape>
struct StatesSmem {
  typename TileLoader<T, Shape, 4>::LoaderSmem feed;
  Parts<Shape> parts;
};
template <class T, class Shape>
__global__ void __launch_bounds__(kThreads, Shape::kRule == Rule::exact ? 5 : 3)
    states_kernel(Plan plan, ChannelScanBackward bwd, BackwardWorkspace s) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<StatesSmem<T, Shape>*>(memory);
  using State = typename Shape::State;
  const LaneState<T, Shape> lane(plan, false);
  const View views[] = {plan.args.x, plan.args.delta, plan.args.z, bwd.dy};
  TileLoader<T, Shape, 4> feed(shared.feed, lane, views);
  feed.start(0);
  const Column<T> dzs = lane.kept_column(bwd.dz);
  const bool gated = plan.args.z.data;
  State S = load<State>(plan.args.chunk_states + lane.states(plan.chunks, lane.chunk));
  State P;
  State H = {};
  float decays = 0;
  if constexpr (Shape::kRule == Rule::channel) feed.channel_rate = lane.decay_rates();
#pragma unroll
  for (float& x : P.at) x = 1;
  for (int tile = 0; tile < lane.steps; tile += kTile) {
    feed.finish();
    feed.start(tile + kTile);
#pragma unroll 1
    for (int sub = 0; sub < kTile; sub += kSub) {
      if (lane.live) {
        float* out = s.sub(lane, tile + sub);
#pragma unroll
        for (int n = 0; n < Shape::kPerLane; ++n) out[n * plan.args.channels] = S[n];
      }
      StepSums<T, Shape> sums;
#pragma unroll
      for (int i = 0; i < kSub; ++i) {
        const bool exists = tile + sub + i < lane.steps;
        const float step = feed.step_size(sub + i, exists);
        const float dy = exists ? feed.get(3, sub + i) : 0.f;
        const SiluGate gate(feed.get(2, sub + i));
        const float dout = gated ? dy * gate.value : dy;
        const float* q = feed.q(sub + i);
        decays += step;
        float y = lane.D * feed.get(0, sub + i);
        State product;
        feed.advance(S, sub + i, step, [&](int n, float kept) {
          y += S[n] * q[n];
          product[n] = S[n] * dout;
          if constexpr (Shape::kRule == Rule::exact) return;
          P[n] *= kept;
          H[n] += P[n] * (q[n] * dout);
        });
        y = lane.over_parts(y);
        if (gated) lane.store(dzs, tile + sub + i, dy * y * gate.slope);
        sums.add(i, product, (i + 1) % sums.kTogether == 0);
      }
      sums.write(shared.parts, sub);
    }
    __syncthreads();
    store_parts(s.dq, shared.parts, lane, tile);
  }
  if (Shape::kRule == Rule::exact || !lane.live) return;
  store(s.ends + lane.states(plan.chunks, lane.chunk), H);
  if constexpr (Shape::kHasRate) store(s.decays + lane.states(plan.chunks, lane.chunk), P);
  else if (lane.first) s.decays[lane.channels(plan.chunks, lane.chunk)] = decays;
}

// The last pass goes backwards through a chunk, or through the whole sequence of the exact update,
// kSub steps at a time. G is the gradient of the state.
template <class T, class Shape>
struct GradientsSmem {
  static constexpr int kOfChannel = Shape::kRule == Rule::channel ? Shape::kPerLane : 0;
  typename TileLoader<T, Shape, 4>::LoaderSmem feed;
  Parts<Shape> dk;
  Parts<Shape> drate[Shape::kRule == Rule::token ? 1 : 0];
  // each thread its column
  float G[Shape::kRule == Rule::exact ? 0 : Shape::kPerLane][kThreads];
  float rate[kOfChannel][kThreads];
  float drate_sum[kOfChannel][kThreads];
};
// The step sizes and output gradients of kSub steps, which a thread reads, and its results: G k,
// summed over the states, and the gradient of the step size.
struct Steps {
  float size[kSub];
  float dout[kSub];
  float through_write[kSub] = {};
  float dsize[kSub] = {};
};

// Two states at a time: first forwards from the stored state, the decays and what they act on into
// registers, then back.
template <class T, class Shape>
__device__ void steps_back(GradientsSmem<T, Shape>& shared, const LaneState<T, Shape>& lane,
                           const TileLoader<T, Shape, 4>& feed, const BackwardWorkspace& s, int t,
                           int sub, Vec<float, 2>& next, Steps& steps) {
  constexpr int kPerLane = Shape::kPerLane;
  constexpr int kLanes = Shape::kLanes;
  constexpr int kPairs = 8 / kLanes;
  constexpr bool kOfChannel = Shape::kRule == Rule::channel;
  constexpr bool kOfToken = Shape::kRule == Rule::token;
  constexpr bool kDiagonal = Shape::kRule == Rule::diagonal;
  const ChannelSums<T, Shape> channels;
  const int own = threadIdx.x;
  const int warp = own / 32;
  const float* start = s.sub(lane, t);
  float write[kSub];
#pragma unroll
  for (int i = 0; i < kSub; ++i) write[i] = steps.size[i] * feed.get(0, sub + i);
  // (kSub steps × 2 states) × kPairs pairs of states × kLanes, spread over the warp
#pragma unroll 1
  for (int result = 0; result < kLanes; ++result) {
    float dk[4] = {};
    float drate[4] = {};
#pragma unroll 1
    for (int pair = 0; pair < kPairs; ++pair) {
      const int first = 2 * (result * kPairs + pair);
      float decays[kSub][2];
      float held[kSub][2];
      float product[2 * kSub];
      float rate_product[2 * kSub];
      float G[2];
      float channel_rate[2] = {};
      float sum[2] = {};
      const auto rate = [&](int i, int k) {
        return kOfChannel ? channel_rate[k] : feed.rate(sub + i, first + k);
      };
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int n = first + k;
        G[k] = shared.G[n][own];
        if constexpr (kOfChannel) {
          channel_rate[k] = shared.rate[n][own];
          sum[k] = shared.drate_sum[n][own];
        }
        float S = next[k];
        next[k] = start[(n + 2) % kPerLane * lane.plan.args.channels];
#pragma unroll
        for (int i = 0; i < kSub; ++i) {
          decays[i][k] = decay<Shape::kRule>(steps.size[i], rate(i, k));
          const float kept = decays[i][k] * S;
          held[i][k] = kDiagonal ? S : kept;
          S = kept + write[i] * feed.k(sub + i)[n];
        }
      }
#pragma unroll
      for (int i = kSub - 1; i >= 0; --i) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const float key = feed.k(sub + i)[first + k];
          G[k] += steps.dout[i] * feed.q(sub + i)[first + k];
          const float through = G[k] * held[i][k];
          const float drate = through * steps.size[i];
          steps.through_write[i] += G[k] * key;
          steps.dsize[i] += through * rate(i, k);
          product[2 * i + k] = G[k] * write[i] - (kDiagonal ? 2 * key * drate : 0.f);
          rate_product[2 * i + k] = drate;
          sum[k] += drate;
          G[k] *= decays[i][k];
        }
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        shared.G[first + k][own] = G[k];
        if constexpr (kOfChannel) shared.drate_sum[first + k][own] = sum[k];
      }
      channels.add(dk, pair * kLanes, product);
      if constexpr (kOfToken) channels.add(drate, pair * kLanes, rate_product);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int row = channels.row(k);
      const int column = channels.column(k);
      const int t = sub + row / 2;
      const int n = column % kLanes * kPerLane + 2 * (result * kPairs + column / kLanes) + row % 2;
      shared.dk[warp][t][n] = dk[k];
      if constexpr (kOfToken) shared.drate[0][warp][t][n] = drate[k];
    }
  }
  if (t > 0) s.load_sub(next, lane, t - kSub);
  float norm[kSub];  // kᵀk shortens the step: dk += k Σ norm over the channels
#pragma unroll
  for (int i = 0; i < kSub; ++i) {
    steps.through_write[i] = lane.over_parts(steps.through_write[i]);
    steps.dsize[i] = feed.get(0, sub + i) * steps.through_write[i] +
                     (kDiagonal ? -1.f : kLn2) * lane.over_parts(steps.dsize[i]);
    norm[i] = lane.part == 0 ? -2 * steps.dsize[i] * steps.size[i] * steps.size[i] : 0.f;
  }
  if constexpr (kDiagonal) {
    butterfly_sum<1, 32>(norm);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kSub; ++i)
      for (int n = own % 32; n < Shape::kStates; n += 32)
        shared.dk[warp][sub + i][n] += norm[i] * shared.feed.k[sub + i][n];
  }
}
// The exact update sums over the states of a channel at each step before it goes on, so a thread
// takes all its states at a time: `next` before the first of the steps, S before each, then G.
template <class T, class Shape>
__device__ void steps_back(GradientsSmem<T, Shape>& shared, const LaneState<T, Shape>& lane,
                           const TileLoader<T, Shape, 4>& feed, const BackwardWorkspace& s, int t,
                           int sub, typename Shape::State& next, typename Shape::State& G,
                           Steps& steps) {
  typename Shape::State S[kSub];
  float rest[kSub];
#pragma unroll
  for (int i = 0; i < kSub; ++i) {
    S[i] = next;
    rest[i] = feed.advance(next, sub + i, steps.size[i], [](int, float) {});
  }
  if (t > 0) s.load_sub(next, lane, t - kSub);
  StepSums<T, Shape> sums;
#pragma unroll
  for (int i = kSub - 1; i >= 0; --i) {
    const float* q = feed.q(sub + i);
    const float* k = feed.k(sub + i);
    const float size = steps.size[i];
#pragma unroll
    for (int n = 0; n < Shape::kPerLane; ++n) G[n] += steps.dout[i] * q[n];
    const float through = lane.over_parts(dot(G, k));
    const float held = size * through;
    steps.through_write[i] = through;
    steps.dsize[i] = through * rest[i];
    typename Shape::State dk;
#pragma unroll
    for (int n = 0; n < Shape::kPerLane; ++n) {
      dk[n] = size * rest[i] * G[n] - held * S[i][n] - 2 * steps.dsize[i] * size * size * k[n];
      G[n] -= held * k[n];
    }
    sums.add(i, dk, i % sums.kTogether == 0);
  }
  sums.write(shared.dk, sub);
}

template <class T, class Shape>
__global__ void __launch_bounds__(kThreads, Shape::kRule == Rule::exact ? 2 : 3)
    gradients_kernel(Plan plan, ChannelScanBackward bwd, BackwardWorkspace s) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<GradientsSmem<T, Shape>*>(memory);
  using State = typename Shape::State;
  constexpr bool kSequential = Shape::kRule == Rule::exact;
  constexpr bool kOfChannel = Shape::kRule == Rule::channel;
  const LaneState<T, Shape> lane(plan, kSequential);
  const View views[] = {plan.args.x, plan.args.delta, plan.args.z, bwd.dy};
  TileLoader<T, Shape, 4> feed(shared.feed, lane, views);
  const int last = (lane.steps - 1) / kTile * kTile;
  const int own = threadIdx.x;
  feed.start(last);
  const Column<T> dxs = lane.kept_column(bwd.dx);
  const Column<T> ddeltas = lane.kept_column(bwd.ddelta);
  const bool gated = plan.args.z.data;
  float dD = 0;
  float dbias = 0;
  State G;
  State rate;
  constexpr int kNext = kSequential ? Shape::kPerLane : 2;
  Vec<float, kNext> next;
  s.load_sub(next, lane, (lane.steps - 1) / kSub * kSub);
  if constexpr (kSequential) G = lane.read(bwd.dfinal_state, lane.b);
  else G = load<State>(s.ends + lane.states(plan.chunks, lane.chunk));
  if (!lane.live) G = {};
  if constexpr (kOfChannel) rate = lane.decay_rates();
#pragma unroll
  for (int n = 0; n < Shape::kPerLane; ++n) {
    if constexpr (!kSequential) shared.G[n][own] = G[n];
    if constexpr (kOfChannel) {
      shared.rate[n][own] = rate[n];
      shared.drate_sum[n][own] = 0;
    }
  }
  for (int tile = last; tile >= 0; tile -= kTile) {
    feed.finish();
    if (tile > 0) {
      feed.start(tile - kTile);
      if constexpr (!kSequential) s.prefetch(lane, tile - kTile);
    }
#pragma unroll 1
    for (int sub = kTile - kSub; sub >= 0; sub -= kSub) {
      if (tile + sub >= lane.steps) continue;
      Steps steps;
#pragma unroll
      for (int i = 0; i < kSub; ++i) {
        const bool exists = tile + sub + i < lane.steps;
        const float dy = exists ? feed.get(3, sub + i) : 0.f;
        steps.size[i] = feed.step_size(sub + i, exists);
        const float gate = SiluGate(feed.get(2, sub + i)).value;
        steps.dout[i] = gated ? dy * gate : dy;
        dD += steps.dout[i] * feed.get(0, sub + i);
      }
      if constexpr (kSequential) steps_back(shared, lane, feed, s, tile + sub, sub, next, G, steps);
      else steps_back(shared, lane, feed, s, tile + sub, sub, next, steps);
#pragma unroll
      for (int i = 0; i < kSub; ++i) {
        const int t = tile + sub + i;
        // before the slope, so that the compiler predicates the stores and does not branch
        lane.store(dxs, t, lane.D * steps.dout[i] + steps.size[i] * steps.through_write[i]);
        const float draw = steps.dsize[i] * feed.step_slope(sub + i, steps.size[i]);
        lane.store(ddeltas, t, draw);
        dbias += t < lane.steps ? draw : 0.f;
      }
    }
    __syncthreads();
    store_parts(s.dk, shared.dk, lane, tile);
    if constexpr (Shape::kRule == Rule::token) store_parts(s.drate, shared.drate[0], lane, tile);
  }
  if (kSequential && bwd.dinitial_state) lane.write(bwd.dinitial_state, lane.b, G);
  const int64_t chunks = kSequential ? 1 : plan.chunks;
  if constexpr (kOfChannel) {
#pragma unroll
    for (int n = 0; n < Shape::kPerLane; ++n) G[n] = shared.drate_sum[n][own];
    lane.write(s.drate, lane.b * chunks + lane.chunk, G);
  }
  if (!lane.first) return;
  s.dD[lane.channels(chunks, lane.chunk)] = dD;
  s.dbias[lane.channels(chunks, lane.chunk)] = dbias;
}

}  // namespace
}  // namespace token

size_t workspace_bytes(const ChannelScanBackward& bwd) {
  return workspace_size<token::BackwardWorkspace>(token::Plan(bwd.forward));
}

void channel_scan(const ChannelScanBackward& bwd, void* workspace, Stream stream) {
  using namespace token;
  const ChannelScanForward& args = bwd.forward;
  const Plan plan(args, {args.x, args.delta, args.z, bwd.dy},
                  {args.k, args.q, args.rate, bwd.dx, bwd.ddelta, bwd.dz});
  const auto s = workspace_at<BackwardWorkspace>(workspace, plan);
  const bool exact = plan.rule == Rule::exact;
  with_shape(plan, [&]<class T, class Shape>(T, Shape) {
    static_assert(sizeof(StatesSmem<T, Shape>) <= kPortableSharedBytes);
    static_assert(sizeof(GradientsSmem<T, Shape>) <= kPortableSharedBytes);
    launch_kernel(states_kernel<T, Shape>, plan.blocks(false), kThreads,
                  sizeof(StatesSmem<T, Shape>), stream, plan, bwd, s);
    if (!exact) carry(plan, s.ends, s.decays, bwd.dfinal_state, bwd.dinitial_state, true, stream);
    launch_kernel(gradients_kernel<T, Shape>, plan.blocks(exact), kThreads,
                  sizeof(GradientsSmem<T, Shape>), stream, plan, bwd, s);
  });
  const int64_t tokens = args.batch * args.time * args.groups * args.state_size;
  const int64_t rows = args.batch * (exact ? 1 : plan.chunks);
  sum_rows(s.dk, bwd.dk, plan.tiles, tokens, stream);
  sum_rows(s.dq, bwd.dq, plan.tiles, tokens, stream);
  if (plan.rule == Rule::channel)
    sum_rows(s.drate, bwd.drate, rows, args.channels * args.state_size, stream);
  else sum_rows(s.drate, bwd.drate, plan.tiles, tokens, stream);
  sum_rows(s.dD, bwd.dD, rows, args.channels, stream);
  sum_rows(s.dbias, bwd.ddelta_bias, rows, args.channels, stream);
}

}  // namespace assay::ops::cuda
