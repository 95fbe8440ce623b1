#pragma once
// How the kernels cut the work, and how its pieces come into shared memory. A thread holds kPerLane
// states of a channel, and kLanes threads side by side share the channel. Tokens are packed first:
// what a thread reads of one lies together, in float32, zeros past the last state, so that
// nothing below asks where N ends or rows lie.
#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "ops/cuda/attention.cuh"
#include "ops/cuda/math.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/token_scan/kernel.h"

namespace assay::ops::cuda::token {

constexpr int kPerLane = 8;
constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kTile = 16;  // steps that a block holds in shared memory, with as many on their way
constexpr int kSub = 8;    // steps whose states `gradients` holds in registers
constexpr int64_t kMaxChunk = 512;

// How wide the kernels are made: 16 states, two threads a channel, or 64 and eight.
template <int kLanes>
struct Shape {
  static constexpr int kStates = kPerLane * kLanes;  // those after N are 0
  static constexpr int kWidth = kThreads / kLanes;   // channels of a block
  static constexpr int kRow = kLanes * 28;           // numbers of a packed token
};
inline int lanes(const TokenScanForward& p) { return p.state_size <= Shape<2>::kStates ? 2 : 8; }

// The call, and how it is cut.
struct Plan {
  TokenScanForward p;
  int states;                    // with those after N
  int64_t tiles, chunk, chunks;  // blocks side by side; steps of a chunk
  bool aligned = false;          // every row of a tile can be read 16 bytes at a time

  explicit Plan(const TokenScanForward& p) : p(p), states(kPerLane * lanes(p)) {
    tiles = ceil_div(p.channels, kThreads / lanes(p));
    // Longer chunks mean fewer states to store and carry; but there must be enough blocks to fill
    // the chip a few times.
    chunk = kMaxChunk;
    while (chunk > 32 && p.batch * tiles * ceil_div(p.time, chunk) < 1500) chunk /= 2;
    chunks = ceil_div(p.time, chunk);
  }
  Plan(const TokenScanForward& p, int64_t element, std::initializer_list<View> read) : Plan(p) {
    aligned = p.channels * element % 16 == 0 && rows_aligned(read, element);
  }
  unsigned blocks(bool whole) const { return unsigned(p.batch * tiles * (whole ? 1 : chunks)); }
  int64_t chunk_numbers() const { return p.batch * chunks * p.channels * states; }
  int64_t token_numbers() const { return p.batch * p.time * lanes(p) * Shape<1>::kRow; }
};

// f(T{}, the update, the lanes) for what the call needs, the last two as integral constants.
template <class F>
void with_shape(const TokenScanForward& p, F&& f) {
  auto with_update = [&](auto type) {
    with_constant<Update::decay, Update::diagonal, Update::exact>(p.update, [&](auto update) {
      with_constant<2, 8>(lanes(p), [&](auto lanes) { f(type, update, lanes); });
    });
  };
  p.dtype == DType::bf16 ? with_update(bf16{}) : with_update(float{});
}

using Eight = Vec<float, kPerLane>;
__device__ inline Eight load(const float* in) { return *reinterpret_cast<const Eight*>(in); }
__device__ inline void store(float* out, const Eight& x) { *reinterpret_cast<Eight*>(out) = x; }

__device__ inline float dot(const Eight& x, const Eight& y) {
  float sum[2] = {};
#pragma unroll
  for (int n = 0; n < kPerLane; ++n) sum[n % 2] += x[n] * y[n];
  return sum[0] + sum[1];
}

// What a thread reads of a token.
struct Token {
  Eight k, q, rate;         // rate: k² where there is none; times log2 e, for 2^x
  float square, unused[3];  // kᵀk; 0
};
static_assert(sizeof(Token) == Shape<1>::kRow * sizeof(float));

void check(const TokenScanForward& p);          // throws Unsupported
void pack(const Plan&, float* tokens, Stream);  // [B, T, lanes] Token

// What a thread owns: kPerLane states of one channel over a chunk, or over the whole sequence. A
// thread after the last channel is idle: it reads zeros for x, delta, z and dy, so it adds nothing
// to a sum over channels, and writes nothing.
template <int kLanes>
struct LaneState : Shape<kLanes> {
  const Plan& a;
  int64_t tile, chunk, b, d, begin;
  // of the chunk; of the channel's threads; of the block; channels that the block has
  int steps, part, channel, width;
  bool live, first;  // `first`: speaks for the channel
  float bias, D;

  __device__ LaneState(const Plan& a, bool whole) : a(a) {
    int64_t i = blockIdx.x;
    tile = i % a.tiles;
    i /= a.tiles;
    chunk = whole ? 0 : i % a.chunks;
    b = whole ? i : i / a.chunks;
    part = threadIdx.x % kLanes;
    channel = threadIdx.x / kLanes;
    width = int(min(a.p.channels - tile * LaneState::kWidth, int64_t{LaneState::kWidth}));
    live = channel < width;
    first = live && part == 0;
    d = tile * LaneState::kWidth + (live ? channel : 0);
    begin = chunk * a.chunk;
    steps = int(whole ? a.p.time : min(a.chunk, a.p.time - begin));
    bias = a.p.delta_bias ? a.p.delta_bias[d] : 0.f;
    D = a.p.D ? a.p.D[d] : 0.f;
  }
  // Of this thread in [B, rows, Dm, states] and of its channel in [B, rows, Dm].
  __device__ int64_t states(int64_t rows, int64_t row) const {
    return channels(rows, row) * LaneState::kStates + part * kPerLane;
  }
  __device__ int64_t channels(int64_t rows, int64_t row) const {
    return (b * rows + row) * a.p.channels + d;
  }
  // From and to a caller's [B, Dm, N].
  __device__ Eight read_state(const float* in) const {
    Eight S;
#pragma unroll
    for (int n = 0; n < kPerLane; ++n)
      S[n] = in && part * kPerLane + n < a.p.state_size ? in[outer(n)] : 0.f;
    return S;
  }
  __device__ void write_state(float* out, const Eight& S) const {
#pragma unroll
    for (int n = 0; n < kPerLane; ++n)
      if (live && part * kPerLane + n < a.p.state_size) out[outer(n)] = S[n];
  }
  __device__ int64_t outer(int n) const {
    return (b * a.p.channels + d) * a.p.state_size + part * kPerLane + n;
  }
  // Step t of this channel.
  template <class T>
  __device__ T* at(const View& v, int t) const {
    return static_cast<T*>(v.data) + b * v.batch_stride + (begin + t) * v.time_stride + d;
  }
  // Σ over the channel's threads, for each of them.
  __device__ static float over_parts(float x) { return butterfly<1, kLanes>(x, Plus{}); }
};

// Brings tiles of packed tokens and of kCount [B, T, Dm] tensors into shared memory, one tile ahead
// of the work.
template <class T, int kCount, int kLanes>
struct TileLoader : Shape<kLanes> {
  static constexpr int kPiece = 16 / sizeof(T), kTokens = kTile * TileLoader::kRow,
                       kTileSize = kTile * TileLoader::kWidth;
  static constexpr int kBytes = 2 * (kTokens * sizeof(float) + kCount * kTileSize * sizeof(T));
  const LaneState<kLanes>& lane;
  const View (&views)[kCount];
  const float* source;  // packed tokens of the chunk
  float* tokens;        // [2, kTile, kRow]
  T* tiles;             // [2, kCount, kTile, kWidth]
  int here = 1;         // the half that is worked on
  const Token* token_here = nullptr;
  const T* tile_here = nullptr;

  __device__ TileLoader(const LaneState<kLanes>& lane, const View (&views)[kCount],
                        const float* packed, void* shared)
      : lane(lane),
        views(views),
        source(packed + (lane.b * lane.a.p.time + lane.begin) * TileLoader::kRow),
        tokens(static_cast<float*>(shared)),
        tiles(reinterpret_cast<T*>(tokens + 2 * kTokens)) {}

  // Sets out for the tile from step t on. No thread may still read the tile before the
  // present one. Steps after the last hold finite numbers wherever the last step does.
  __device__ void start(int t) {
    t = min(t, lane.steps - 1);
    const int last = (lane.steps - t) * TileLoader::kRow / 4 - 1;
    const float* from = source + int64_t{t} * TileLoader::kRow;
#pragma unroll 1
    for (int i = threadIdx.x; i < kTokens / 4; i += kThreads)
      cp_async_16(tokens + (1 - here) * kTokens + 4 * i, from + 4 * min(i, last));
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      if (views[k].data) copy_rows(tiles + ((1 - here) * kCount + k) * kTileSize, views[k], t);
    cp_async_commit_group();
  }
  // The tile is there, for the whole block, which is done with the one before.
  __device__ void finish() {
    here = 1 - here;
    token_here = reinterpret_cast<const Token*>(tokens + here * kTokens) + lane.part;
    tile_here = tiles + here * kCount * kTileSize + lane.channel;
    cp_async_wait_all();
    __syncthreads();
  }
  // The k-th tensor at step i of the tile, in this thread's channel.
  __device__ float get(int k, int i) const {
    return to_compute(tile_here[(k * kTile + i) * TileLoader::kWidth]);
  }
  __device__ const Token& token(int i) const { return token_here[i * kLanes]; }

 private:
  // Channels after the last are 0.
  __device__ void copy_rows(T* to, const View& v, int t) const {
    const T* from =
        static_cast<const T*>(v.data) + lane.b * v.batch_stride + lane.tile * TileLoader::kWidth;
    const int64_t begin = lane.begin + t, last = lane.begin + lane.steps - 1;
    if (lane.a.aligned) copy_pieces<kPiece>(to, from, begin, last, v.time_stride);
    else copy_pieces<1>(to, from, begin, last, v.time_stride);
  }
  template <int kSize>
  __device__ void copy_pieces(T* to, const T* from, int64_t begin, int64_t last,
                              int64_t stride) const {
#pragma unroll 1
    for (int i = threadIdx.x * kSize; i < kTileSize; i += kThreads * kSize) {
      const int row = i / TileLoader::kWidth, column = i % TileLoader::kWidth;
      const bool there = column < lane.width;
      const T* at = from + min(begin + row, last) * stride + (there ? column : 0);
      if constexpr (kSize > 1) cp_async_16(to + i, at, there);
      else to[i] = there ? *at : from_compute<T>(0.f);
    }
  }
};

// p where `exists`, else 0: the state stays as it is.
template <class T, Update kUpdate>
__device__ float step_size(const Plan& a, float raw, float square, bool exists) {
  float p = raw;
  if constexpr (kUpdate == Update::decay) {
    if (a.p.delta_softplus) p = softplus<T>(raw);
  } else {
    const float beta = sigmoid_approx(raw);
    p = __fdividef(beta, 1 + beta * square);
  }
  return exists ? p : 0.f;
}
// The derivative of p with respect to `raw`.
template <class T, Update kUpdate>
__device__ float step_slope(const Plan& a, float raw, float step, float square) {
  if constexpr (kUpdate == Update::decay) return a.p.delta_softplus ? softplus_slope<T>(step) : 1.f;
  const float beta = sigmoid_approx(raw), held = __fdividef(1.f, 1 + beta * square);
  return held * held * beta * (1 - beta);
}

template <Update kUpdate>
__device__ float decay(float step, float rate) {
  return kUpdate == Update::decay ? ex2_approx(step * rate) : 1 - step * rate;
}

// x − S k before the step, which comes back.
template <int kLanes>
__device__ float advance_exact(Eight& S, float step, float x, const Eight& k) {
  const float rest = x - LaneState<kLanes>::over_parts(dot(S, k));
#pragma unroll
  for (int n = 0; n < kPerLane; ++n) S[n] += step * rest * k[n];
  return rest;
}
// One step of any update; x − S k of the exact one.
template <Update kUpdate, int kLanes>
__device__ float advance(Eight& S, float step, float x, const Token& token) {
  if constexpr (kUpdate == Update::exact) return advance_exact<kLanes>(S, step, x, token.k);
  const Eight k = token.k, rate = token.rate;
#pragma unroll
  for (int n = 0; n < kPerLane; ++n) S[n] = decay<kUpdate>(step, rate[n]) * S[n] + step * x * k[n];
  return 0;
}

// Turns the own ends of the chunks, `states`, into what reaches each of them: before the first
// `first`, then product · what came before + own end. Backwards, the chunks are met from the last
// on. `last`: what leaves the last one met. Both [B, Dm, N] or null.
void carry(const Plan&, float* states, const float* products, const float* first, float* last,
           bool backwards, Stream);

}  // namespace assay::ops::cuda::token
