// Mamba-3's element-wise parts on CUDA. In the rotation, a thread has 8 channels of one head and
// takes them through the steps of a chunk, so angles and sums over steps stay in registers.
#include <algorithm>

#include "ops/cuda/rowwise.cuh"
#include "ops/rowwise/mamba3_elements/kernel.h"

namespace assay::ops::cuda {
namespace {

constexpr int kWidth = 8;  // channels of a thread
constexpr int kPairs = kWidth / 2;
constexpr int kThreads = 384;    // of a block, at most
constexpr int kBlocksPerSm = 2;  // of the backward pass
// Values that a thread adds up over heads: db, dc and dturns. Shared memory has halves of them by
// lane, at a distance without bank conflicts.
constexpr int kValues = 2 * kWidth + kPairs;
constexpr int kHalf = kValues / 2;
constexpr int kStride = kHalf + 1;

// The threads of a block: 2^`lane_bits` for each of `heads` heads of one group. `slices` blocks
// share a group.
struct Layout {
  int lane_bits = 0;  // up to 5
  int heads;
  int slices;
  explicit Layout(const Mamba3Rotate& args) {
    while (lanes() * kWidth < args.state_size) ++lane_bits;
    const int64_t threads = args.dtype == DType::f64 ? kThreads / 2 : kThreads;
    const int64_t of_group = args.heads / args.groups;
    heads = int(std::min(of_group, threads / lanes()));
    slices = int(ceil_div(of_group, heads));
  }
  __host__ __device__ int lanes() const { return 1 << lane_bits; }
  unsigned threads() const { return unsigned(ceil_div(heads * lanes(), 32) * 32); }
  // Rows whose values are added up together, and numbers in shared memory for the values of one.
  __host__ __device__ int rows() const { return lane_bits < 5 ? 4 : 2; }
  __host__ __device__ int row_size(unsigned threads) const {
    return int(threads / 32) * 2 * lanes() * kStride;
  }
};
int64_t chunks_of(const Mamba3Rotate& args) { return ceil_div(args.time, args.chunk); }
int64_t backward_blocks(const Mamba3Rotate& args) {
  const int64_t wanted = ceil_div(kBlocksPerSm * sm_count(), args.groups * Layout(args).slices);
  return std::min(args.batch * chunks_of(args), wanted);
}

// Which head and channels a thread has. Without any, it reads the first channels of a head that
// there is, and `live` is false.
struct Place {
  int64_t group;
  int64_t head;
  int channel;
  bool live;
  __device__ Place(const Mamba3Rotate& args, const Layout& layout) {
    const int of_group = int(args.heads / args.groups);
    const int local = int(threadIdx.x) >> layout.lane_bits;
    const int slot = int(blockIdx.y) % layout.slices * layout.heads + local;
    channel = (int(threadIdx.x) & (layout.lanes() - 1)) * kWidth;
    live = local < layout.heads && slot < of_group && channel < args.state_size;
    group = int(blockIdx.y) / layout.slices;
    head = group * of_group + min(slot, of_group - 1);
    if (!live) channel = 0;
  }
};

// The steps of a chunk.
struct Steps {
  int64_t start;  // row of args.starts
  int64_t first;  // row of the other tensors
  int count;
  __device__ Steps(const Mamba3Rotate& args, int64_t chunk_of_all) {
    const int64_t chunks = (args.time + args.chunk - 1) / args.chunk;
    const int64_t batch = quotient(chunk_of_all, chunks);
    const int64_t chunk = chunk_of_all - batch * chunks;
    start = batch * (chunks + 1) + chunk;
    first = batch * args.time + chunk * args.chunk;
    count = int(min(args.chunk, args.time - chunk * args.chunk));
  }
};

template <class T>
__device__ Vec<T, kWidth> load(const T* from) {
  return *reinterpret_cast<const Vec<T, kWidth>*>(from);
}
template <class T>
__device__ void sin_cos(Real<T> x, Real<T>& s, Real<T>& c) {
  if constexpr (sizeof(T) == 2) __sincosf(x, &s, &c);
  else if constexpr (sizeof(T) == 4) sincosf(x, &s, &c);
  else sincos(x, &s, &c);
}
// Rounds a pair and puts it at 2i: one conversion for two bf16.
template <class T>
__device__ void put_pair(Vec<T, kWidth>& out, int i, Real<T> x, Real<T> y) {
  if constexpr (sizeof(T) == 2) {
    store_bf16x2(&out[2 * i], x, y);
  } else {
    out[2 * i] = x;
    out[2 * i + 1] = y;
  }
}

// Rows of b, c, steps and turns for the steps of a chunk, as a thread reads them, and the angles of
// its pairs, which are 0 for channels that do not turn.
template <class T>
struct Inputs {
  using R = Real<T>;
  const T* in[2];
  int in_stride;
  const R* steps;
  int heads;
  const R* turns;
  int pairs;
  int turning;  // pairs of the thread that turn
  R angle[kPairs];
  // The angles are those of row `start` of args.starts.
  __device__ Inputs(const Mamba3Rotate& args, const Place& place, int64_t first, int64_t start) {
    in_stride = int(args.groups * args.state_size);
    heads = int(args.heads);
    pairs = int(args.pairs);
    const int64_t at = first * in_stride + place.group * args.state_size + place.channel;
    in[0] = static_cast<const T*>(args.b) + at;
    in[1] = static_cast<const T*>(args.c) + at;
    steps = static_cast<const R*>(args.steps) + first * heads + place.head;
    const int pair = place.channel / 2;
    turns = static_cast<const R*>(args.turns) + first * pairs + pair;
    turning = place.live ? min(pairs - pair, kPairs) : 0;
    const R* from =
        static_cast<const R*>(args.starts) + (start * heads + place.head) * pairs + pair;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) angle[i] = i < turning ? from[i] : R(0);
  }
  __device__ void turns_at(int t, R (&out)[kPairs]) const {
    const R* from = turns + t * pairs;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) out[i] = i < turning ? from[i] : R(0);
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads) rotate_kernel(const __grid_constant__ Mamba3Rotate args,
                                                          const __grid_constant__ Layout layout) {
  using R = Real<T>;
  const Place place(args, layout);
  const Steps steps(args, blockIdx.x);
  Inputs<T> inputs(args, place, steps.first, steps.start);
  const int width = int(args.heads * args.state_size);
  const int64_t of_head = place.head * args.state_size + place.channel;
  const R* biases = static_cast<const R*>(args.biases) + of_head;
  const Vec<R, kWidth> bias[2] = {load(biases), load(biases + width)};
  T* const rotated[2] = {static_cast<T*>(args.rotated_b) + steps.first * width + of_head,
                         static_cast<T*>(args.rotated_c) + steps.first * width + of_head};
  R* const dots = static_cast<R*>(args.dot) + steps.first * args.heads + place.head;
#pragma unroll 2
  for (int t = 0; t < steps.count; ++t) {
    const Vec<T, kWidth> in[2] = {load(inputs.in[0] + t * inputs.in_stride),
                                  load(inputs.in[1] + t * inputs.in_stride)};
    R turns[kPairs];
    inputs.turns_at(t, turns);
    const R step = inputs.steps[t * inputs.heads];
    Vec<T, kWidth> out[2];
    R dot = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      R s;
      R c;
      inputs.angle[i] += step * turns[i];
      sin_cos<T>(inputs.angle[i], s, c);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const R x = to_compute(in[k][2 * i]) + bias[k][2 * i];
        const R y = to_compute(in[k][2 * i + 1]) + bias[k][2 * i + 1];
        put_pair(out[k], i, x * c - y * s, x * s + y * c);
      }
      for (int n = 2 * i; n < 2 * i + 2; ++n) dot += to_compute(out[0][n]) * to_compute(out[1][n]);
    }
    dot = group_sum(place.live ? dot : R(0), layout.lanes());
    if (!place.live) continue;
#pragma unroll
    for (int k = 0; k < 2; ++k) *reinterpret_cast<Vec<T, kWidth>*>(rotated[k] + t * width) = out[k];
    if (place.channel == 0) dots[t * inputs.heads] = dot;
  }
}

// Adds the values of the heads of a warp, for each lane, and puts them where add_heads finds them.
template <class R>
__device__ void put_values(const Layout& layout, const R (&values)[kValues], R* sums) {
  const int lanes = layout.lanes();
  const int lane = threadIdx.x % 32;
  R* const own =
      sums + ((int(threadIdx.x / 32) << (layout.lane_bits + 1)) + (lane & (lanes - 1))) * kStride;
  if (lanes == 32) {
#pragma unroll
    for (int n = 0; n < kValues; ++n) own[n / kHalf * lanes * kStride + n % kHalf] = values[n];
    return;
  }
  // each half of the warp keeps one half of the values
  const bool upper = lane & 16;
  R half[kHalf];
#pragma unroll
  for (int n = 0; n < kHalf; ++n) {
    const R low = values[n];
    const R high = values[n + kHalf];
    half[n] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, 16);
  }
  for (int step = lanes; step < 16; step *= 2)
#pragma unroll
    for (int n = 0; n < kHalf; ++n) half[n] += __shfl_xor_sync(~0u, half[n], step);
  if ((lane & 15) < lanes)
#pragma unroll
    for (int n = 0; n < kHalf; ++n) own[(upper ? lanes * kStride : 0) + n] = half[n];
}
// Adds what the warps have put for `count` rows, the last one first, and writes the sums of the
// rows from `first` on.
template <class R>
__device__ void add_heads(const Mamba3RotateBackward& bwd, const Layout& layout, int64_t first,
                          int count, int64_t group, const R* sums) {
  const Mamba3Rotate& args = bwd.forward;
  const int bits = layout.lane_bits;
  const int64_t rows = args.batch * args.time;
  const int64_t slice = int(blockIdx.y) % layout.slices;
  const int warps = blockDim.x / 32;
  for (int r = 0; r < count; ++r) {
    const int64_t row = first + count - 1 - r;
    const int64_t of_group = ((slice * rows + row) * args.groups + group) * args.state_size;
    const int64_t of_turns = (blockIdx.y * rows + row) * args.pairs;
    for (int i = threadIdx.x; i < kValues << bits; i += blockDim.x) {
      const int part = i >> (bits + 3);  // db, dc, dturns
      const int column = i - (part << (bits + 3));
      const int width_bits = part < 2 ? 3 : 2;
      const int value = part * kWidth + (column & ((1 << width_bits) - 1));
      const int upper = value >= kHalf;
      const R* from =
          sums + ((upper << bits) + (column >> width_bits)) * kStride + value - upper * kHalf;
      R sum = 0;
#pragma unroll 4
      for (int w = 0; w < warps; ++w) sum += from[w * (2 * kStride << bits)];
      if (part < 2 && column < args.state_size)
        static_cast<R*>(part == 0 ? bwd.db : bwd.dc)[of_group + column] = sum;
      if (part == 2 && column < args.pairs) static_cast<R*>(bwd.dturns)[of_turns + column] = sum;
    }
    sums += layout.row_size(blockDim.x);
  }
}

// bias_sums: [blocks, 2, H, N]
template <class T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    rotate_backward_kernel(const __grid_constant__ Mamba3RotateBackward bwd,
                           const __grid_constant__ Layout layout, Real<T>* bias_sums) {
  using R = Real<T>;
  extern __shared__ double shared[];
  const Mamba3Rotate& args = bwd.forward;
  const Place place(args, layout);
  const int width = int(args.heads * args.state_size);
  const int64_t of_head = place.head * args.state_size + place.channel;
  const R* biases = static_cast<const R*>(args.biases) + of_head;
  R* const sums = reinterpret_cast<R*>(shared);
  R dbias[2][kWidth] = {};
  const int64_t all = args.batch * ((args.time + args.chunk - 1) / args.chunk);
  for (int64_t n = blockIdx.x; n < all; n += gridDim.x) {
    const Steps steps(args, n);
    Inputs<T> inputs(args, place, steps.first, steps.start + 1);
    const int64_t from = steps.first * width + of_head;
    const T* const gradients[2] = {static_cast<const T*>(bwd.drotated_b) + from,
                                   static_cast<const T*>(bwd.drotated_c) + from};
    const int64_t of_steps = steps.first * inputs.heads + place.head;
    const R* const ddots = static_cast<const R*>(bwd.ddot) + of_steps;
    R* const dsteps = static_cast<R*>(bwd.dsteps) + of_steps;
    R dangle[kPairs] = {};
    for (int t = steps.count - 1; t >= 0; --t) {
      const Vec<T, kWidth> in[2] = {load(inputs.in[0] + t * inputs.in_stride),
                                    load(inputs.in[1] + t * inputs.in_stride)};
      const Vec<T, kWidth> g[2] = {load(gradients[0] + t * width), load(gradients[1] + t * width)};
      // read in each step, because registers are few
      const Vec<R, kWidth> bias[2] = {load(biases), load(biases + width)};
      const R step = inputs.steps[t * inputs.heads];
      const R ddot = ddots[t * inputs.heads];
      R turns[kPairs];
      inputs.turns_at(t, turns);
      R values[kValues];
      R dstep = 0;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        R s;
        R c;
        sin_cos<T>(inputs.angle[i], s, c);
        inputs.angle[i] -= step * turns[i];
        R x[2][2];
        R v[2][2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          x[k][0] = to_compute(in[k][2 * i]) + bias[k][2 * i];
          x[k][1] = to_compute(in[k][2 * i + 1]) + bias[k][2 * i + 1];
          const R first = to_compute(g[k][2 * i]);
          const R second = to_compute(g[k][2 * i + 1]);
          v[k][0] = first * c + second * s;
          v[k][1] = second * c - first * s;
        }
        if (i < inputs.turning)
          dangle[i] +=
              v[0][1] * x[0][0] - v[0][0] * x[0][1] + v[1][1] * x[1][0] - v[1][0] * x[1][1];
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const R u = place.live ? v[k][j] + ddot * x[1 - k][j] : R(0);
            dbias[k][2 * i + j] += u;
            values[k * kWidth + 2 * i + j] = u;
          }
        dstep += dangle[i] * turns[i];
        values[2 * kWidth + i] = dangle[i] * step;
      }
      dstep = group_sum(dstep, layout.lanes());
      if (place.live && place.channel == 0) dsteps[t * inputs.heads] = dstep;
      const int done = (steps.count - 1 - t) % layout.rows();
      put_values(layout, values, sums + done * layout.row_size(blockDim.x));
      if (done + 1 < layout.rows() && t > 0) continue;
      __syncthreads();
      add_heads(bwd, layout, steps.first + t, done + 1, place.group, sums);
      __syncthreads();
    }
    R* const to = static_cast<R*>(bwd.dangles) + (n * inputs.heads + place.head) * inputs.pairs +
                  place.channel / 2;
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      if (i < inputs.turning) to[i] = dangle[i];
  }
  if (!place.live) return;
  R* const to = bias_sums + blockIdx.x * int64_t{2} * width + of_head;
#pragma unroll
  for (int k = 0; k < 2; ++k)
#pragma unroll
    for (int i = 0; i < kWidth; ++i) to[k * width + i] = dbias[k][i];
}

}  // namespace

int64_t slices(const Mamba3Rotate& args) { return Layout(args).slices; }

size_t workspace_bytes(const Mamba3RotateBackward& bwd) {
  const Mamba3Rotate& args = bwd.forward;
  const int64_t numbers = backward_blocks(args) * 2 * args.heads * args.state_size;
  return size_t(numbers * (args.dtype == DType::f64 ? 8 : 4));
}

void mamba3_rotate(const Mamba3Rotate& args, Stream stream) {
  const Layout layout(args);
  const dim3 grid(unsigned(args.batch * chunks_of(args)), unsigned(args.groups * layout.slices));
  with_type(args.dtype, [&]<class T>(T) {
    launch_kernel(rotate_kernel<T>, grid, layout.threads(), 0, stream, args, layout);
  });
}

void mamba3_rotate(const Mamba3RotateBackward& bwd, void* workspace, Stream stream) {
  const Mamba3Rotate& args = bwd.forward;
  const Layout layout(args);
  const int64_t blocks = backward_blocks(args);
  const dim3 grid(unsigned(blocks), unsigned(args.groups * layout.slices));
  with_type(args.dtype, [&]<class T>(T) {
    using R = Real<T>;
    auto* sums = static_cast<R*>(workspace);
    const size_t bytes = size_t(layout.rows() * layout.row_size(layout.threads())) * sizeof(R);
    launch_kernel(rotate_backward_kernel<T>, grid, layout.threads(), bytes, stream, bwd, layout,
                  sums);
    sum_rows(sums, bwd.dbiases, blocks, 2 * args.heads * args.state_size, stream);
  });
}

ASSAY_ROWWISE_CUDA(Mamba3Write)
ASSAY_ROWWISE_CUDA(Mamba3Output)

}  // namespace assay::ops::cuda
