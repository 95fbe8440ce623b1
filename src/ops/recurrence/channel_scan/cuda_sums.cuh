#pragma once
// Sums over the channels of a warp on tensor cores, then over the warps of a block.
#include "ops/recurrence/channel_scan/cuda_tiles.cuh"

namespace assay::ops::cuda::token {

// Sums by m16n8k8 products with matrices of zeros and ones. The first product sums over the four
// lanes of each quad; two more bring the eight quads side by side, and the last one sums over the
// quads that hold the same states. For bf16 the 11 bits of tf32 are enough; an fp32 number goes in
// as the sum of two.
template <class T, class Shape>
struct ChannelSums {
  int quad = threadIdx.x % 32 / 4;
  int within = threadIdx.x % 4;

  // Column `column` + part of the 16 × 8 `result` += Σ value over the channels of the warp, for
  // each part of a channel. Every lane of the warp calls it.
  __device__ void add(float (&result)[4], int column, const float (&value)[16]) const {
    float sums[4] = {};   // numbers 4 · within + k of the own quad
    float quads[4] = {};  // 16 numbers × 8 quads
#pragma unroll
    for (int m = 0; m < 4; ++m)
      data_left(sums, {value[4 * m], value[4 * m + 2], value[4 * m + 1], value[4 * m + 3]},
                is(2 * m), is(2 * m + 1));
    data_right(quads, {at(0), at(0 - 8), at(1), at(1 - 8)}, sums[0], sums[1]);
    data_right(quads, {at(2), at(2 - 8), at(3), at(3 - 8)}, sums[2], sums[3]);
    data_left(result, {quads[0], quads[2], quads[1], quads[3]}, is(column + part(2 * within)),
              is(column + part(2 * within + 1)));
  }
  // Where the lane's k-th number of a result lies.
  __device__ int row(int k) const { return quad + k / 2 * 8; }
  __device__ int column(int k) const { return within * 2 + k % 2; }

 private:
  static constexpr bool kSplit = sizeof(T) > 2;
  __device__ static int part(int quad) { return quad * Shape::kLanes / 8; }
  __device__ float is(int i) const { return quad == i ? 1.f : 0.f; }
  __device__ float at(int i) const { return quad == 4 * within + i ? 1.f : 0.f; }
  __device__ static void data_left(float (&c)[4], const float (&a)[4], float b0, float b1) {
    mma_m16n8k8(c, {tf32(a[0]), tf32(a[1]), tf32(a[2]), tf32(a[3])}, b0, b1);
    if constexpr (kSplit) mma_m16n8k8(c, {rest(a[0]), rest(a[1]), rest(a[2]), rest(a[3])}, b0, b1);
  }
  __device__ static void data_right(float (&c)[4], const float (&a)[4], float b0, float b1) {
    mma_m16n8k8(c, a, tf32(b0), tf32(b1));
    if constexpr (kSplit) mma_m16n8k8(c, a, rest(b0), rest(b1));
  }
  // A product ignores the last 13 bits of its operands; fp32 has to know which number it took.
  __device__ static float tf32(float x) {
    return kSplit ? __uint_as_float(__float_as_uint(x) & 0xffffe000u) : x;
  }
  __device__ static float rest(float x) { return x - tf32(x); }
};

// The partial sums of each warp for the steps of a tile.
template <class Shape>
using Parts = float[kWarps][kTile][Shape::kStates + 1];

// The sums of kSub steps, which are added one after another, forwards or backwards.
template <class T, class Shape>
struct StepSums {
  static constexpr int kTogether = 16 / Shape::kPerLane;  // steps of one product
  const ChannelSums<T, Shape> channels;
  float sums[Shape::kStates / 16][4] = {};
  float value[16];

  __device__ void add(int step, const typename Shape::State& x, bool last_together) {
#pragma unroll
    for (int n = 0; n < Shape::kPerLane; ++n) value[step % kTogether * Shape::kPerLane + n] = x[n];
    const int column = step / kTogether * Shape::kLanes;
    if (last_together) channels.add(sums[column / 8], column % 8, value);
  }
  __device__ void write(Parts<Shape>& parts, int sub) const {
#pragma unroll
    for (int i = 0; i < Shape::kStates / 4; ++i) {
      const int row = channels.row(i % 4);
      const int column = i / 4 * 8 + channels.column(i % 4);
      const int step = column / Shape::kLanes * kTogether + row / Shape::kPerLane;
      const int state = column % Shape::kLanes * Shape::kPerLane + row % Shape::kPerLane;
      parts[threadIdx.x / 32][sub + step][state] = sums[i / 4][i % 4];
    }
  }
};

// Their sum over the block's warps, into [tiles, B, T, G, N].
template <class T, class Shape>
__device__ void store_parts(float* out, const Parts<Shape>& parts, const LaneState<T, Shape>& lane,
                            int tile) {
  const ChannelScanForward& args = lane.plan.args;
  const unsigned N = unsigned(args.state_size);
  const unsigned stride = unsigned(args.groups) * N;
  const int64_t row = (lane.tile * args.batch + lane.b) * args.time + lane.begin + tile;
  float* to = out + (row * args.groups + lane.group) * N;
#pragma unroll
  for (unsigned i = threadIdx.x; i < kTile * Shape::kStates; i += kThreads) {
    const unsigned t = i / Shape::kStates;
    const unsigned n = i % Shape::kStates;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += parts[w][t][n];
    if (int(tile + t) < lane.steps && n < N) to[t * stride + n] = sum;
  }
}

}  // namespace assay::ops::cuda::token
