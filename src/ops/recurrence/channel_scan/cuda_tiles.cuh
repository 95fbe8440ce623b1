#pragma once
// How the kernels cut the work, and how its pieces come into shared memory. A thread holds kPerLane
// states of a channel in registers; kLanes threads of a warp share a channel. Time is cut into
// chunks, and each block walks one chunk of its channels tile by tile.
#include <algorithm>
#include <initializer_list>

#include "ops/cuda/attention.cuh"
#include "ops/cuda/math.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/recurrence/channel_scan/kernel.h"

namespace assay::ops::cuda::token {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kTile = 16;  // steps that a block holds in shared memory, with as many on their way
constexpr int kSub = 8;    // steps between two states that the backward stores
constexpr int64_t kMaxChunk = 512;
// largest stride of time, in elements: in bytes it has to fit 32 bits
constexpr int64_t kMaxStride = int64_t{1} << 28;

// Where the decay comes from: a rate of each channel or of each token, or k.
enum class Rule { channel, token, diagonal, exact };
inline Rule rule_of(const ChannelScanForward& args) {
  if (args.update == Update::exact) return Rule::exact;
  if (args.update == Update::diagonal) return Rule::diagonal;
  return args.rate_of_channels ? Rule::channel : Rule::token;
}

constexpr int states_per_lane(Rule rule) { return rule == Rule::exact ? 8 : 16; }

// Template parameters of the kernels: a rule, and 16 or 64 states, of which those from N on are 0.
template <Rule kRule_, int kStates_>
struct Shape {
  static constexpr Rule kRule = kRule_;
  static constexpr int kStates = kStates_;
  static constexpr int kPerLane = states_per_lane(kRule);
  static constexpr int kLanes = kStates / kPerLane;
  static constexpr int kWidth = kThreads / kLanes;  // channels of a block
  static constexpr bool kHasRate = kRule == Rule::token || kRule == Rule::diagonal;
  static constexpr bool kHasSquare = kRule == Rule::diagonal || kRule == Rule::exact;
  using State = Vec<float, kPerLane>;
};

// The call, and how it is cut.
struct Plan {
  ChannelScanForward args;
  Rule rule;
  int states;  // with those after N
  // channels, blocks of a group; steps of a chunk
  int64_t group_width;
  int64_t tiles;
  int64_t chunk;
  int64_t chunks;
  bool aligned = false;  // every row of a tile can be read 16 bytes at a time

  explicit Plan(const ChannelScanForward& args)
      : args(args),
        rule(rule_of(args)),
        states(args.state_size <= 16 ? 16 : kMaxTokenStates),
        group_width(args.channels / args.groups),
        tiles(ceil_div(group_width, kThreads * states_per_lane(rule) / states)),
        chunk(kMaxChunk) {
    // Longer chunks mean fewer states to store and carry; but there must be enough blocks to fill
    // the chip a few times.
    while (chunk > 32 && args.batch * args.groups * tiles * ceil_div(args.time, chunk) < 1500)
      chunk /= 2;
    chunks = ceil_div(args.time, chunk);
  }
  // Throws Unsupported.
  Plan(const ChannelScanForward& args, std::initializer_list<View> read,
       std::initializer_list<View> others);
  unsigned blocks(bool whole) const {
    return unsigned(args.batch * args.groups * tiles * (whole ? 1 : chunks));
  }
  int64_t rows() const { return args.batch * chunks * args.channels; }
  // Numbers of what tells the decay of each chunk: Σ Δ, or the product for every state.
  int64_t decay_numbers() const {
    return rule == Rule::exact ? 0 : rows() * (rule == Rule::channel ? 1 : states);
  }
};

// f(T{}, Shape) for what the call needs.
template <class F>
void with_shape(const Plan& plan, F&& f) {
  auto with_dtype = [&](auto type) {
    with_constant<Rule::channel, Rule::token, Rule::diagonal, Rule::exact>(
        plan.rule, [&](auto rule) {
          with_constant<16, int(kMaxTokenStates)>(
              plan.states, [&](auto states) { f(type, Shape<rule(), states()>{}); });
        });
  };
  plan.args.dtype == DType::bf16 ? with_dtype(bf16{}) : with_dtype(float{});
}

// One column of rows that lie `stride` bytes apart. One multiply-add makes an address.
template <class T>
struct Column {
  char* data;
  uint32_t stride;
  __device__ T& operator[](uint32_t t) const {
    return *reinterpret_cast<T*>(data + uint64_t{t} * stride);
  }
};

// The share of a thread: kPerLane states of one channel over a chunk, or over the whole sequence. A
// thread after the group's last channel is idle: it reads zeros for x, delta, z and dy, and the
// parameters of another channel. It adds nothing to a sum over channels, and writes nothing.
template <class T, class Shape>
struct LaneState : Shape {
  using typename Shape::State;
  static constexpr int kWarpChannels = 32 / Shape::kLanes;
  const Plan& plan;
  // `block`: its first channel
  int64_t b;
  int64_t group;
  int64_t tile;
  int64_t chunk;
  int64_t block;
  int64_t d;
  int64_t begin;
  // steps of the chunk; part of the channel; channel of the block; channels that the block has
  int steps;
  int part;
  int channel;
  int width;
  int owned;  // steps that this thread writes for its channel: all of them or none
  // `first`: speaks for the channel
  bool live;
  bool first;
  // D: 0 except in the first thread of the channel
  float bias;
  float D;

  __device__ LaneState(const Plan& plan, bool whole) : plan(plan) {
    unsigned i = blockIdx.x;  // Divisions of 64 bits take five times as long.
    tile = i % unsigned(plan.tiles);
    i /= unsigned(plan.tiles);
    group = i % unsigned(plan.args.groups);
    i /= unsigned(plan.args.groups);
    chunk = whole ? 0 : i % unsigned(plan.chunks);
    b = whole ? i : i / unsigned(plan.chunks);
    part = Shape::kLanes == 1 ? 0 : threadIdx.x % 32 / kWarpChannels;
    channel = Shape::kLanes == 1 ? threadIdx.x
                                 : threadIdx.x / 32 * kWarpChannels + threadIdx.x % kWarpChannels;
    width = int(min(plan.group_width - tile * Shape::kWidth, int64_t{Shape::kWidth}));
    live = channel < width;
    first = live && part == 0;
    block = group * plan.group_width + tile * Shape::kWidth;
    d = block + (live ? channel : 0);
    begin = chunk * plan.chunk;
    steps = int(whole ? plan.args.time : min(plan.chunk, plan.args.time - begin));
    owned = first ? steps : 0;
    bias = plan.args.delta_bias ? plan.args.delta_bias[d] : 0.f;
    D = plan.args.D && part == 0 ? plan.args.D[d] : 0.f;
  }
  template <class U = T>
  __device__ Column<U> column(const View& v, int64_t i) const {
    U* data = static_cast<U*>(v.data) + b * v.batch_stride + begin * v.time_stride + i;
    return {reinterpret_cast<char*>(data), uint32_t(v.time_stride * sizeof(U))};
  }
  // To be kept: the compiler would rather work the address out again at every store.
  __device__ Column<T> kept_column(const View& v) const {
    Column<T> column = this->column(v, d);
    asm volatile("" : "+l"(column.data));
    __builtin_assume(__isGlobal(column.data));
    return column;
  }
  __device__ void store(const Column<T>& out, int t, float x) const {
    if (t < owned) out[t] = from_compute<T>(x);
  }
  // Where its states are in [B, rows, Dm, states], and its channel in [B, rows, Dm].
  __device__ int64_t states(int64_t rows, int64_t row) const {
    return channels(rows, row) * Shape::kStates + part * Shape::kPerLane;
  }
  __device__ int64_t channels(int64_t rows, int64_t row) const {
    return (b * rows + row) * plan.args.channels + d;
  }
  // States from and to a caller's [rows, Dm, N], where a null `in` is zeros.
  __device__ State read(const float* in, int64_t row) const {
    const float* from = in + outer(row);
    State x;
#pragma unroll
    for (int n = 0; n < Shape::kPerLane; ++n) x[n] = in && has(n) ? from[n] : 0.f;
    return x;
  }
  __device__ void write(float* out, int64_t row, const State& x) const {
    float* to = out + outer(row);
#pragma unroll
    for (int n = 0; n < Shape::kPerLane; ++n)
      if (live && has(n)) to[n] = x[n];
  }
  __device__ bool has(int n) const { return part * Shape::kPerLane + n < plan.args.state_size; }
  __device__ int64_t outer(int64_t row) const {
    return (row * plan.args.channels + d) * plan.args.state_size + part * Shape::kPerLane;
  }
  // exp(Δ A) = 2^(Δ A log2 e)
  __device__ State decay_rates() const {
    State A = read(static_cast<const float*>(plan.args.rate.data), 0);
#pragma unroll
    for (float& x : A.at) x *= kLog2e;
    return A;
  }
  // Σ over the channel's threads, for each of them.
  __device__ static float over_parts(float x) { return butterfly<kWarpChannels, 32>(x, Plus{}); }
};

template <class State>
__device__ State load(const float* in) {
  return *reinterpret_cast<const State*>(in);
}
template <class State>
__device__ void store(float* out, const State& x) {
  *reinterpret_cast<State*>(out) = x;
}
template <class State>
__device__ float dot(const State& x, const float* y, float first = 0) {
  float sum[2] = {first, 0};
#pragma unroll
  for (int n = 0; n < int(sizeof(State) / sizeof(float)); ++n) sum[n % 2] += x[n] * y[n];
  return sum[0] + sum[1];
}

// The factor of a state in a step: 2^(step · rate), or 1 − step · rate with k² as the rate.
template <Rule kRule>
__device__ float decay(float step, float rate) {
  if constexpr (kRule == Rule::exact) return 1;
  return kRule == Rule::diagonal ? 1 - step * rate : ex2_approx(step * rate);
}

// Brings tiles of the tokens and of kCount [B, T, Dm] tensors, x and delta first, into shared
// memory, one tile ahead of the work.
template <class T, class Shape, int kCount>
struct TileLoader : Shape {
  using typename Shape::State;
  static constexpr int kStates = Shape::kStates;
  static constexpr int kWidth = Shape::kWidth;
  static constexpr int kPiece = 16 / sizeof(T);
  static constexpr int kPieces = kWidth / kPiece;
  static constexpr int kRows = kThreads / kPieces;
  // A warp loads whole tokens: a thread has columns kColumns apart.
  static constexpr int kColumns = std::min(32, kStates);
  static constexpr int kTokenParts = kStates / kColumns;
  static constexpr int kTokenRows = kThreads / kColumns;
  static constexpr int kValues = kTile * kStates / kThreads;
  static constexpr bool kReadsQ = kCount > 2;  // the states of a chunk alone do not need it
  struct LoaderSmem {
    alignas(16) T tile[2][kCount][kTile][kWidth];
    alignas(16) float k[kTile][kStates];
    alignas(16) float q[kTile][kStates];
    alignas(16) float rate[Shape::kHasRate ? kTile : 1][kStates];
    float square[kTile];     // kᵀk
    char* base[kCount + 2];  // address of each tensor, k, q: 64-bit products are many instructions
  };
  LoaderSmem& shared;
  const LaneState<T, Shape>& lane;
  const View (&views)[kCount];
  State channel_rate = {};  // Rule::channel
  T next_k[kValues];
  T next_q[kValues];
  float next_rate[kValues];
  int here = 1;  // the half of shared.tile that is worked on

  __device__ TileLoader(LoaderSmem& shared, const LaneState<T, Shape>& lane,
                        const View (&views)[kCount])
      : shared(shared), lane(lane), views(views) {
    if (threadIdx.x == 0) {
      const int64_t first = lane.group * lane.plan.args.state_size;
#pragma unroll
      for (int i = 0; i < kCount; ++i) shared.base[i] = lane.column(views[i], lane.block).data;
      shared.base[kCount] = lane.column(lane.plan.args.k, first).data;
      shared.base[kCount + 1] = lane.column(lane.plan.args.q, first).data;
    }
    __syncthreads();
  }

  // Sets out for the tile from step t on. The tile before may still be worked on, but not the
  // one before that.
  __device__ void start(int t) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (views[i].data) copy(shared.tile[1 - here][i], base(i, views[i]), t);
    cp_async_commit_group();
    const Column<T> k = base(kCount, lane.plan.args.k);
    const Column<T> q = base(kCount + 1, lane.plan.args.q);
    const Column<float> rate = lane.template column<float>(lane.plan.args.rate, 0);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int step = min(t + token_row(i), lane.steps - 1);
      const int n = min(token_column(i), int(lane.plan.args.state_size) - 1);
      next_k[i] = (&k[step])[n];
      if constexpr (kReadsQ) next_q[i] = (&q[step])[n];
      if constexpr (Shape::kRule == Rule::token) next_rate[i] = (&rate[step])[n];
    }
  }
  // The tile is there, for the whole block. No thread may still read the one before.
  __device__ void finish() {
    here = 1 - here;
    float square = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int row = token_row(i);
      const int n = token_column(i);
      const bool there = n < lane.plan.args.state_size;
      const float key = there ? to_compute(next_k[i]) : 0.f;
      shared.k[row][n] = key;
      if constexpr (kReadsQ) shared.q[row][n] = there ? to_compute(next_q[i]) : 0.f;
      if constexpr (Shape::kRule == Rule::token)
        shared.rate[row][n] = there ? next_rate[i] * kLog2e : 0.f;
      if constexpr (Shape::kRule == Rule::diagonal) shared.rate[row][n] = key * key;
      if constexpr (Shape::kHasSquare) {
        square = (i % kTokenParts == 0 ? 0 : square) + key * key;
        if (i % kTokenParts + 1 == kTokenParts)
          shared.square[row] = group_reduce<kColumns>(square, Plus{});
      }
    }
    cp_async_wait_all();
    __syncthreads();
  }
  // The k-th tensor at step i of the tile, in this thread's channel.
  __device__ float get(int k, int i) const {
    return to_compute(shared.tile[here][k][i][lane.channel]);
  }
  // k and q of step i, in this thread's states, and their rate.
  __device__ const float* k(int i) const { return &shared.k[i][lane.part * Shape::kPerLane]; }
  __device__ const float* q(int i) const { return &shared.q[i][lane.part * Shape::kPerLane]; }
  __device__ float rate(int i, int n) const {
    if constexpr (Shape::kRule == Rule::channel) return channel_rate[n];
    if constexpr (Shape::kHasRate) return shared.rate[i][lane.part * Shape::kPerLane + n];
    return 0;
  }
  // Δ or p of step i; where it does not exist 0, and the state stays as it is.
  __device__ float step_size(int i, bool exists) const {
    const float raw = get(1, i) + lane.bias;
    float p = raw;
    if constexpr (Shape::kHasSquare) {
      const float beta = sigmoid_approx(raw);
      p = __fdividef(beta, 1 + beta * shared.square[i]);
    } else {
      const float soft = softplus<T>(raw);  // computed always: a branch splits the schedule
      p = lane.plan.args.delta_softplus ? soft : raw;
    }
    return exists ? p : 0.f;
  }
  // The derivative of `step`, the step size, with respect to delta.
  __device__ float step_slope(int i, float step) const {
    const float slope = Shape::kHasSquare ? 0 : softplus_slope<T>(step);
    if constexpr (!Shape::kHasSquare) return lane.plan.args.delta_softplus ? slope : 1.f;
    const float beta = sigmoid_approx(get(1, i) + lane.bias);
    const float held = __fdividef(1.f, 1 + beta * shared.square[i]);
    return held * held * beta * (1 - beta);
  }
  // Step i, where `each`(n, decay) sees the decay of state n before the next one. Returns what was
  // written: x, or for the exact update x − S k.
  template <class F>
  __device__ float advance(State& S, int i, float step, F&& each) const {
    float x = get(0, i);
    if constexpr (Shape::kRule == Rule::exact) x -= lane.over_parts(dot(S, k(i)));
    const float write = step * x;
#pragma unroll
    for (int n = 0; n < Shape::kPerLane; ++n) {
      const float kept = decay<Shape::kRule>(step, rate(i, n));
      S[n] = kept * S[n] + write * k(i)[n];
      each(n, kept);
    }
    return x;
  }

 private:
  __device__ static int token_row(int i) {
    return threadIdx.x / kColumns + i / kTokenParts * kTokenRows;
  }
  __device__ static int token_column(int i) {
    return threadIdx.x % kColumns + i % kTokenParts * kColumns;
  }
  __device__ Column<T> base(int i, const View& v) const {
    char* data = shared.base[i];
    __builtin_assume(__isGlobal(data));
    return {data, uint32_t(v.time_stride * sizeof(T))};
  }
  // Rows after the last step repeat it; channels after the last are 0.
  __device__ void copy(T (&to)[kTile][kWidth], Column<T> in, int t) const {
    if (lane.plan.aligned) {
      const int i = threadIdx.x % kPieces * kPiece;
      const int first = threadIdx.x / kPieces;
      const bool there = i < lane.width;
      in.data += (there ? i : 0) * sizeof(T);
#pragma unroll
      for (int row = 0; row < kTile; row += kRows)
        if (kRows <= kTile || first < kTile)
          cp_async_16(&to[row + first][i], &in[min(t + row + first, lane.steps - 1)], there);
    } else {
      const int i = threadIdx.x % kWidth;
      const int first = threadIdx.x / kWidth;
      const bool there = i < lane.width;
      in.data += (there ? i : 0) * sizeof(T);
      T value[kTile / Shape::kLanes];
#pragma unroll
      for (int row = 0; row < kTile; row += Shape::kLanes)
        value[row / Shape::kLanes] = in[min(t + row + first, lane.steps - 1)];
#pragma unroll
      for (int row = 0; row < kTile; row += Shape::kLanes)
        to[row + first][i] = there ? value[row / Shape::kLanes] : from_compute<T>(0.f);
    }
  }
};

// Turns the own ends of the chunks, `states`, into what reaches each of them: before the first
// `first`, then decay · what came before + own end. Backwards, the chunks are met from the last
// on. `last`: what leaves the last one met. Both [B, Dm, N] or null.
void carry(const Plan&, float* states, const float* decays, const float* first, float* last,
           bool backwards, Stream);

}  // namespace assay::ops::cuda::token
