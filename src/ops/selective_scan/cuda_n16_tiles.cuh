#pragma once
// How the kernels for 16 states cut the work, and how its pieces come into shared memory.
#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/math.cuh"
#include "ops/selective_scan/kernel.h"

namespace assay::ops::cuda::n16 {

constexpr int kStates = 16;
constexpr int kThreads = 128;  // channels of a block
constexpr int kWarps = kThreads / 32;
constexpr int kTile = 16;  // steps that a block holds in shared memory, with as many on their way
constexpr int64_t kMaxChunk = 512;
// of time, in elements: in bytes it has to fit 32 bits
constexpr int64_t kMaxStride = int64_t{1} << 28;

// Longer chunks mean fewer states to store and carry; but there must be enough blocks to fill the
// chip a few times.
inline int64_t chunk_size(const SelectiveScanForward& p) {
  const int64_t tiles = p.batch * p.groups * ceil_div(p.channels / p.groups, kThreads);
  for (int64_t chunk = kMaxChunk; chunk > 32; chunk /= 2)
    if (tiles * ceil_div(p.time, chunk) >= 1500) return chunk;
  return 32;
}

// The call, and how it is cut.
struct Plan {
  SelectiveScanForward p;
  int64_t chunk, chunks, group_width, group_tiles;
  bool aligned = false;  // every row of a tile can be read 16 bytes at a time

  explicit Plan(const SelectiveScanForward& p)
      : p(p),
        chunk(chunk_size(p)),
        chunks(ceil_div(p.time, chunk)),
        group_width(p.channels / p.groups),
        group_tiles(ceil_div(group_width, kThreads)) {}
  Plan(const SelectiveScanForward& p, int64_t element, std::initializer_list<View> read) : Plan(p) {
    aligned = group_width * element % 16 == 0 && rows_aligned(read, element);
  }
  unsigned blocks() const { return unsigned(p.batch * chunks * p.groups * group_tiles); }
};

// A channel of a chunk of a [B, T, Dm] tensor. One multiply-add makes an address.
template <class T>
struct Column {
  char* data;
  uint32_t stride;  // in bytes
  __device__ T& operator[](uint32_t t) const {
    return *reinterpret_cast<T*>(data + uint64_t{t} * stride);
  }
};

// What a thread owns: one channel of one chunk. A thread after the group's last channel is idle: it
// reads zeros for u, delta, z and dy, and A and the like of another channel; so it adds nothing to
// a sum over channels. It writes nothing.
template <class T>
struct LaneState {
  const SelectiveScanForward& p;
  int64_t b, group, group_tile, chunk, d, begin;
  int steps, width;  // of the chunk that lie in the sequence; of the block that lie in the group
  int owned;         // steps that this thread writes: all of them, or none where it is idle
  bool live;
  float bias, D;

  __device__ explicit LaneState(const Plan& a) : p(a.p) {
    int64_t i = blockIdx.x;
    group_tile = i % a.group_tiles;
    i /= a.group_tiles;
    group = i % p.groups;
    i /= p.groups;
    chunk = i % a.chunks;
    b = i / a.chunks;
    width = int(min(a.group_width - group_tile * kThreads, int64_t{kThreads}));
    live = threadIdx.x < width;
    d = group * a.group_width + group_tile * kThreads + (live ? threadIdx.x : 0);
    begin = chunk * a.chunk;
    steps = int(min(a.chunk, p.time - begin));
    owned = live ? steps : 0;
    bias = p.delta_bias ? static_cast<const float*>(p.delta_bias)[d] : 0.f;
    D = p.D ? static_cast<const float*>(p.D)[d] : 0.f;
  }
  __device__ Column<T> column(const View& v) const { return column(v, d); }
  // To be kept: the compiler would rather work the address out again at every store.
  __device__ Column<T> kept_column(const View& v) const {
    Column<T> column = this->column(v, d);
    asm volatile("" : "+l"(column.data));
    __builtin_assume(__isGlobal(column.data));
    return column;
  }
  __device__ Column<T> column(const View& v, int64_t i) const {
    T* data = static_cast<T*>(v.data) + b * v.batch_stride + begin * v.time_stride + i;
    return {reinterpret_cast<char*>(data), uint32_t(v.time_stride * sizeof(T))};
  }
  // Δ; after the last step 0: the state stays as it is.
  __device__ float step_size(float delta, bool exists) const {
    const float x = delta + bias, y = p.delta_softplus ? softplus<T>(x) : x;
    return exists ? y : 0.f;
  }
  __device__ void store(const Column<T>& out, int t, float x) const {
    if (t < owned) out[t] = from_compute<T>(x);
  }
  __device__ void decay_rates(float (&A)[kStates]) const {  // exp(Δ A) = 2^(Δ A log2 e)
#pragma unroll
    for (int n = 0; n < kStates; ++n)
      A[n] = static_cast<const float*>(p.A)[d * kStates + n] * kLog2e;
  }
  // Offset of this channel in a [B, rows, Dm] tensor.
  __device__ int64_t row(int64_t rows, int64_t i) const { return (b * rows + i) * p.channels + d; }
};

// Brings tiles of B, C and of kCount [B, T, Dm] tensors into shared memory, one tile ahead
// of the work.
template <class T, int kCount>
struct TileLoader {
  static constexpr int kPiece = 16 / sizeof(T), kPieces = kThreads / kPiece,
                       kRows = kThreads / kStates;
  struct LoaderSmem {
    alignas(16) T tile[2][kCount][kTile][kThreads];
    alignas(16) float B[kTile][kStates], C[kTile][kStates];
  };
  LoaderSmem& shared;
  const LaneState<T>& lane;
  const bool aligned;
  const View (&views)[kCount];
  T next_B[kTile / kRows], next_C[kTile / kRows];
  int here = 1;  // the half of shared.tile that is worked on

  // Sets out for the tile from step t on. The tile before may still be worked on, but not the
  // one before that.
  __device__ void start(int t) {
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      if (views[k].data) copy(shared.tile[1 - here][k], views[k], t);
    cp_async_commit_group();
    const int n = threadIdx.x % kStates;
    const Column<T> B = lane.column(lane.p.B, lane.group * kStates + n),
                    C = lane.column(lane.p.C, lane.group * kStates + n);
#pragma unroll
    for (int i = 0; i < kTile / kRows; ++i) {
      const int step = min(t + int(threadIdx.x) / kStates + i * kRows, lane.steps - 1);
      next_B[i] = B[step];
      next_C[i] = C[step];
    }
  }
  // The tile is there, for the whole block. No thread may still read the one before.
  __device__ void finish() {
    here = 1 - here;
#pragma unroll
    for (int i = 0; i < kTile / kRows; ++i) {
      const int row = threadIdx.x / kStates + i * kRows, n = threadIdx.x % kStates;
      shared.B[row][n] = to_compute(next_B[i]);
      shared.C[row][n] = to_compute(next_C[i]);
    }
    cp_async_wait_all();
    __syncthreads();
  }
  // The k-th tensor at step i of the tile, in this thread's channel.
  __device__ float get(int k, int i) const {
    return to_compute(shared.tile[here][k][i][threadIdx.x]);
  }

 private:
  // Rows after the last step repeat it; channels after the last are 0.
  __device__ void copy(T (&to)[kTile][kThreads], const View& v, int t) const {
    if (aligned) {
      const int i = threadIdx.x % kPieces * kPiece, first = threadIdx.x / kPieces;
      const bool there = i < lane.width;
      const Column<T> in = lane.column(v, lane.d - (lane.live ? threadIdx.x : 0) + (there ? i : 0));
#pragma unroll
      for (int row = 0; row < kTile; row += kThreads / kPieces)
        cp_async_16(&to[row + first][i], &in[min(t + row + first, lane.steps - 1)], there);
    } else {
      const Column<T> in = lane.column(v);
      T value[kTile];
#pragma unroll
      for (int row = 0; row < kTile; ++row) value[row] = in[min(t + row, lane.steps - 1)];
#pragma unroll
      for (int row = 0; row < kTile; ++row)
        to[row][threadIdx.x] = lane.live ? value[row] : from_compute<T>(0.f);
    }
  }
};

// What each warp adds to dB or dC of a tile's steps.
using Parts = float[kWarps][kTile][kStates + 1];

// Their sum over the block's warps, into [group_tiles, B, T, G, N].
template <class T>
__device__ void store_parts(float* out, const Parts& parts, const LaneState<T>& lane, int tile) {
#pragma unroll
  for (unsigned i = threadIdx.x; i < kTile * kStates; i += kThreads) {
    const unsigned t = i / kStates, n = i % kStates;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += parts[w][t][n];
    const int64_t row =
        (lane.group_tile * lane.p.batch + lane.b) * lane.p.time + lane.begin + tile + t;
    if (int(tile + t) < lane.steps) out[(row * lane.p.groups + lane.group) * kStates + n] = sum;
  }
}

}  // namespace assay::ops::cuda::n16
