#pragma once
// Row-wise operators on CUDA. A thread has a vector of 16 bytes of a part of a row: a part of up to
// 32 vectors belongs to lanes of one warp, a longer one to a block. In operators with kLongParts,
// parts of 33 to 192 vectors belong to lanes of one warp too, with several vectors per lane.
// cuda.cu of an operator instantiates the three functions for its struct.
#include "ops/core/rowwise.h"
#include "ops/cuda/math.cuh"
#include "ops/cuda/reduce.cuh"

namespace assay::ops::cuda {

// Which threads work on a part: `threads` of the `block` threads of a block.
struct RowwiseShape {
  unsigned threads;
  unsigned block;
  int64_t parts_per_block() const { return block / threads; }
};
inline RowwiseShape rowwise_shape(int64_t vectors) {
  unsigned threads = 1;
  while (threads < vectors && threads < 32) threads *= 2;
  if (vectors > 32) threads = unsigned(ceil_div(vectors, 32) * 32);
  return {threads, threads > 32 ? threads : 256u};
}

// a / b of numbers that are not negative, in 32 bits where they fit: a division in 64 bits takes
// about 100 instructions.
__device__ inline int64_t quotient(int64_t a, int64_t b) {
  return (a | b) >> 32 ? a / b : int64_t{uint32_t(a) / uint32_t(b)};
}

// The sums of x over the `threads` threads of a part.
template <int kCount, class R>
__device__ void part_sum(R (&x)[kCount], int threads) {
  for (int n = 0; n < kCount; ++n) x[n] = group_sum(x[n], min(threads, 32));
  if (threads <= 32) return;
  __shared__ R warps[kCount][32];
  const int warp = threadIdx.x / 32;
  __syncthreads();  // the sums of the part before have been read
  if (threadIdx.x % 32 == 0)
    for (int n = 0; n < kCount; ++n) warps[n][warp] = x[n];
  __syncthreads();
  for (int n = 0; n < kCount; ++n) {
    x[n] = 0;
    for (int w = 0; w < threads / 32; ++w) x[n] += warps[n][w];
  }
}

// The kSize elements of a thread: vectors of inputs, of parameters, and of outputs or their
// gradients, the first kRealOutputs of which are real.
template <class F, class T, int kSize>
struct RowwiseElements {
  using R = Real<T>;
  static constexpr int kWeights = kAtLeastOne<F::kParameters + F::kStatistics>;
  static constexpr int kGradients = kAtLeastOne<kParameterGradients<F>>;
  R statistics[kAtLeastOne<F::kStatistics>] = {};
  Vec<T, kSize> in[F::kInputs] = {};
  Vec<R, kSize> parameters[kAtLeastOne<F::kParameters>] = {};
  Vec<R, kSize> real[kAtLeastOne<F::kRealOutputs>] = {};
  Vec<T, kSize> out[kAtLeastOne<F::kOutputs - F::kRealOutputs>] = {};

  // Calls access(a vector, the pointer that belongs to it) for each output.
  template <class Pointers, class Access>
  __device__ void for_each_output(Pointers& pointers, Access&& access) {
#pragma unroll
    for (int n = 0; n < F::kOutputs; ++n) {
      if (n < F::kRealOutputs) access(real[n], static_cast<R*>(const_cast<void*>(pointers[n])));
      else access(out[n - F::kRealOutputs], static_cast<T*>(const_cast<void*>(pointers[n])));
    }
  }
  __device__ void load_parameters(const Rowwise<F>& args, int64_t group, int64_t first) {
    const R* from = static_cast<const R*>(args.parameters) + group * args.width + first;
#pragma unroll
    for (int n = 0; n < F::kParameters; ++n)
      parameters[n] = *reinterpret_cast<const Vec<R, kSize>*>(from + n * args.groups * args.width);
  }
  __device__ void load_inputs(const Rowwise<F>& args, int64_t row, int64_t group, int64_t offset) {
    for (int n = 0; n < F::kStatistics; ++n)
      statistics[n] = static_cast<const R*>(args.statistics[n])[row * args.groups + group];
#pragma unroll
    for (int n = 0; n < F::kInputs; ++n)
      in[n] = *reinterpret_cast<const Vec<T, kSize>*>(static_cast<const T*>(args.in[n]) +
                                                      row * args.row_stride[n] + offset);
  }
  __device__ void get(int k, R (&x)[F::kInputs], R (&w)[kWeights]) const {
    for (int n = 0; n < F::kInputs; ++n) x[n] = to_compute(in[n][k]);
    for (int n = 0; n < F::kParameters; ++n) w[n] = parameters[n][k];
    for (int n = 0; n < F::kStatistics; ++n) w[F::kParameters + n] = statistics[n];
  }
  __device__ void get_outputs(int k, R (&y)[F::kOutputs]) const {
    for (int n = 0; n < F::kOutputs; ++n)
      y[n] = n < F::kRealOutputs ? real[n][k] : to_compute(out[n - F::kRealOutputs][k]);
  }
  __device__ void set_outputs(int k, const R (&y)[F::kOutputs]) {
    for (int n = 0; n < F::kOutputs; ++n) {
      if (n < F::kRealOutputs) real[n][k] = y[n];
      else out[n - F::kRealOutputs][k] = from_compute<T>(y[n]);
    }
  }
};

template <class F, class T, int kSize>
__global__ void __launch_bounds__(kMaxRowwiseThreads)
    rowwise_forward_kernel(const __grid_constant__ Rowwise<F> args, int threads) {
  using R = Real<T>;
  using E = RowwiseElements<F, T, kSize>;
  const int64_t wanted =
      blockIdx.x * int64_t(blockDim.x / unsigned(threads)) + threadIdx.x / unsigned(threads);
  const int64_t part = min(wanted, args.rows * args.groups - 1);
  const int64_t row = quotient(part, args.groups);
  const int64_t group = part - row * args.groups;
  const int64_t first = threadIdx.x % unsigned(threads) * kSize;
  const int64_t offset = group * args.width + first;
  E e;
  R x[F::kInputs];
  R w[E::kWeights];
  R y[F::kOutputs];
  R sums[kAtLeastOne<F::kSums>] = {};
  if (first < args.width) {
    e.load_inputs(args, row, group, offset);
    e.load_parameters(args, group, first);
  }
  if constexpr (F::kSums > 0) {
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      R terms[F::kSums];
      e.get(k, x, w);
      F::terms(x, w, terms);
      for (int n = 0; n < F::kSums; ++n) sums[n] += terms[n];
    }
    part_sum(sums, threads);
    F::finish(sums, R(args.width), R(args.eps));
  }
#pragma unroll
  for (int k = 0; k < kSize; ++k) {
    e.get(k, x, w);
    F::forward(x, w, sums, y);
    e.set_outputs(k, y);
  }
  if (part < wanted || first >= args.width) return;
  const int64_t to = row * args.groups * args.width + offset;
  e.for_each_output(args.out, [&](auto& vector, auto* out) {
    *reinterpret_cast<std::decay_t<decltype(vector)>*>(out + to) = vector;
  });
}

// The threads of a part keep its group, so they sum the gradients of parameters in registers: over
// the rows step, step + stride, …; sums[step] gets them.
template <class F, class T, int kSize>
__global__ void __launch_bounds__(kMaxRowwiseThreads)
    rowwise_backward_kernel(const __grid_constant__ RowwiseBackward<F> bwd, Real<T>* sums,
                            int threads, int64_t stride) {
  using R = Real<T>;
  using E = RowwiseElements<F, T, kSize>;
  constexpr int kSums = F::kSums + F::kBackwardSums;
  const Rowwise<F>& args = bwd.forward;
  const int64_t worker = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / threads;
  const int64_t step = worker / args.groups;
  const int64_t group = worker % args.groups;
  const int64_t first = threadIdx.x % threads * kSize;
  const int64_t offset = group * args.width + first;
  const bool has_elements = first < args.width && step < stride;
  E e;
  if (has_elements) e.load_parameters(args, group, first);
  R dparameters[E::kGradients][kSize] = {};
  // the number of rounds is that of all threads, because they add together
  for (int64_t start = 0; start < args.rows; start += stride) {
    const int64_t row = start + step;
    const int64_t at = row * args.groups * args.width + offset;
    const bool active = has_elements && row < args.rows;
    R x[F::kInputs];
    R w[E::kWeights];
    R dy[F::kOutputs];
    R part[kAtLeastOne<kSums>] = {};
    if (active) {
      e.load_inputs(args, row, group, offset);
      e.for_each_output(bwd.dout, [&](auto& vector, auto* from) {
        vector = *reinterpret_cast<const std::decay_t<decltype(vector)>*>(from + at);
      });
    }
    if constexpr (kSums > 0) {
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        R terms[kSums];
        e.get(k, x, w);
        e.get_outputs(k, dy);
        F::terms(x, w, terms);
        F::backward_terms(x, w, dy, terms + F::kSums);
        for (int n = 0; n < kSums; ++n) part[n] += active ? terms[n] : R(0);
      }
      part_sum(part, threads);
      F::finish(part, R(args.width), R(args.eps));
      F::finish_backward(part, R(args.width), R(args.eps));
    }
    if (!active) continue;
    if constexpr (F::kStatisticGradients)
      for (int n = 0; n < F::kStatistics; ++n)
        if (first == 0)
          static_cast<R*>(bwd.dstatistics[n])[row * args.groups + group] =
              part[kSums - F::kStatistics + n];
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      R dx[F::kInputs];
      R dw[E::kGradients] = {};
      e.get(k, x, w);
      e.get_outputs(k, dy);
      F::backward(x, w, part, dy, dx, dw);
      for (int n = 0; n < F::kInputs; ++n) e.in[n][k] = from_compute<T>(dx[n]);
      for (int n = 0; n < E::kGradients; ++n) dparameters[n][k] += dw[n];
    }
#pragma unroll
    for (int n = 0; n < F::kInputs; ++n)
      *reinterpret_cast<Vec<T, kSize>*>(static_cast<T*>(bwd.din[n]) + row * bwd.din_stride[n] +
                                        offset) = e.in[n];
  }
  if (!has_elements) return;
#pragma unroll
  for (int n = 0; n < kParameterGradients<F>; ++n)
    for (int k = 0; k < kSize; ++k)
      sums[(step * kParameterGradients<F> + n) * args.groups * args.width + offset + k] =
          dparameters[n][k];
}

// Parts of 33 to 192 vectors: lane l of the 16 or 32 lanes of a part has its vectors l, l + lanes,
// …, up to kVectors. A thread copies its vectors of the next row to shared memory while it works on
// a row, so that reads from memory do not stop, although the registers allow few threads. A thread
// reads only what it copied, so warps do not wait for each other.
// A block keeps its group. It has the rows start, …, start + slots − 1, one per slot of `lanes`
// threads, then those `stride` further, and so on.
constexpr int64_t kFewParts = 2 * 132;  // forward, fewer warps would not fill the device
constexpr int kWarpPartThreads = 128;   // threads per block
constexpr int kWarpPartBlocks = 8;      // blocks per SM, at most

template <class F, class T, int kSize, int kVectors, bool kBackward>
struct WarpPart {
  static_assert(F::kRealOutputs == 0 && !F::kStatisticGradients);
  using R = Real<T>;
  using E = RowwiseElements<F, T, kSize>;
  static constexpr int kTensors = F::kInputs + (kBackward ? F::kOutputs : 0);
  static constexpr size_t kBytes = 2 * kTensors * kVectors * kWarpPartThreads * sizeof(uint4);
  static_assert(kBytes <= kPortableSharedBytes);
  const Rowwise<F>& args;
  const void* const* dout;
  const int lanes;
  const int lane;
  const int slots;
  const int slot;
  const int width;
  const int64_t block;
  const int64_t group;
  R statistics[kAtLeastOne<F::kStatistics>];
  R next_statistics[kAtLeastOne<F::kStatistics>];

  __device__ WarpPart(const Rowwise<F>& args, const void* const* dout, int lanes)
      : args(args),
        dout(dout),
        lanes(lanes),
        lane(int(threadIdx.x) & (lanes - 1)),
        slots(kWarpPartThreads / lanes),
        slot(int(threadIdx.x) / lanes),
        width(int(args.width)),
        block(quotient(blockIdx.x, args.groups)),
        group(blockIdx.x - block * args.groups) {}
  // Where in shared memory this thread has its vector j of tensor n of the row of a stage.
  __device__ Vec<T, kSize>* vector(int stage, int n, int j) const {
    extern __shared__ __align__(16) unsigned char stages[];
    return reinterpret_cast<Vec<T, kSize>*>(stages) +
           ((stage * kTensors + n) * kVectors + j) * kWarpPartThreads + threadIdx.x;
  }
  // f(j, first number of vector j, is it in the part); past the end it is the last vector.
  template <class Use>
  __device__ void each(Use&& f) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int column = (lane + j * lanes) * kSize;
      f(j, min(column, width - kSize), column < width);
    }
  }
  __device__ void fetch(int stage, int64_t start) {
    const int64_t row = min(start + slot, args.rows - 1);
    const int64_t part = row * args.groups + group;
    each([&](int j, int column, bool) {
#pragma unroll
      for (int n = 0; n < F::kInputs; ++n)
        cp_async_16(vector(stage, n, j), static_cast<const T*>(args.in[n]) +
                                             row * args.row_stride[n] + group * width + column);
#pragma unroll
      for (int n = F::kInputs; n < kTensors; ++n)
        cp_async_16(vector(stage, n, j),
                    static_cast<const T*>(dout[n - F::kInputs]) + part * width + column);
    });
    for (int n = 0; n < F::kStatistics; ++n)
      next_statistics[n] = static_cast<const R*>(args.statistics[n])[part];
  }
  // f(stage, row). In the last round some rows are past the end, because lanes add together.
  template <class Work>
  __device__ void each_row(int64_t stride, Work&& f) {
    int64_t start = block * slots;
    if (start < args.rows) fetch(0, start);
    cp_async_commit_group();
    for (int stage = 0; start < args.rows; stage ^= 1) {
      for (int n = 0; n < F::kStatistics; ++n) statistics[n] = next_statistics[n];
      if (start + stride < args.rows) fetch(stage ^ 1, start + stride);
      cp_async_commit_group();
      cp_async_wait_group<1>();
      f(stage, start + slot);
      asm volatile("" ::: "memory");  // nothing is read from the stage after this
      start += stride;
    }
    cp_async_wait_all();
  }
  __device__ E elements(int stage, int j, int column) const {
    E e;
#pragma unroll
    for (int n = 0; n < F::kInputs; ++n) e.in[n] = *vector(stage, n, j);
#pragma unroll
    for (int n = F::kInputs; n < kTensors; ++n) e.out[n - F::kInputs] = *vector(stage, n, j);
    for (int n = 0; n < F::kStatistics; ++n) e.statistics[n] = statistics[n];
    e.load_parameters(args, group, column);
    return e;
  }
  // The sums over the part of the terms that add(x, w, dy, terms) has for each number.
  template <int kCount, class Add>
  __device__ void sum(int stage, R (&sums)[kCount], Add&& add) const {
    each([&](int j, int column, bool inside) {
      const E e = elements(stage, j, column);
      R x[F::kInputs];
      R w[E::kWeights];
      R dy[F::kOutputs];
      R of_vector[kCount] = {};
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        R terms[kCount];
        e.get(k, x, w);
        e.get_outputs(k, dy);
        add(x, w, dy, terms);
        for (int n = 0; n < kCount; ++n) of_vector[n] += terms[n];
      }
      for (int n = 0; n < kCount; ++n) sums[n] += inside ? of_vector[n] : R(0);
    });
    for (int n = 0; n < kCount; ++n) sums[n] = group_sum(sums[n], lanes);
    asm volatile("" ::: "memory");  // shared memory keeps the vectors, not registers
  }
};

template <class F, class T, int kSize, int kVectors>
__global__ void __launch_bounds__(kWarpPartThreads)
    warp_part_forward_kernel(const __grid_constant__ Rowwise<F> args, int lanes, int64_t stride) {
  using R = Real<T>;
  using Part = WarpPart<F, T, kSize, kVectors, false>;
  Part part(args, nullptr, lanes);
  part.each_row(stride, [&](int stage, int64_t row) {
    R sums[kAtLeastOne<F::kSums>] = {};
    part.sum(stage, sums, [](const R* x, const R* w, const R*, R* t) { F::terms(x, w, t); });
    F::finish(sums, R(args.width), R(args.eps));
    part.each([&](int j, int column, bool inside) {
      auto e = part.elements(stage, j, column);
      R x[F::kInputs];
      R w[Part::E::kWeights];
      R y[F::kOutputs];
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        e.get(k, x, w);
        F::forward(x, w, sums, y);
        e.set_outputs(k, y);
      }
      if (!inside || row >= args.rows) return;
      e.for_each_output(args.out, [&](auto& vector, auto* out) {
        *reinterpret_cast<std::decay_t<decltype(vector)>*>(
            out + (row * args.groups + part.group) * args.width + column) = vector;
      });
    });
  });
}

// sums[block of the group] gets the gradients of parameters, which the slots of a block add one
// after another.
template <class F, class T, int kSize, int kVectors>
__global__ void __launch_bounds__(kWarpPartThreads, kVectors > 3 ? 3 : 4)
    warp_part_backward_kernel(const __grid_constant__ RowwiseBackward<F> bwd, Real<T>* sums,
                              int lanes, int64_t stride) {
  using R = Real<T>;
  using Part = WarpPart<F, T, kSize, kVectors, true>;
  constexpr int kGradients = Part::E::kGradients;
  constexpr int kSums = F::kSums + F::kBackwardSums;
  const Rowwise<F>& args = bwd.forward;
  Part part(args, bwd.dout, lanes);
  R dparameters[kVectors][kGradients][kSize] = {};
  part.each_row(stride, [&](int stage, int64_t row) {
    R of_part[kSums] = {};
    part.sum(stage, of_part, [](const R* x, const R* w, const R* dy, R* t) {
      F::terms(x, w, t);
      F::backward_terms(x, w, dy, t + F::kSums);
    });
    F::finish(of_part, R(args.width), R(args.eps));
    F::finish_backward(of_part, R(args.width), R(args.eps));
    if (row >= args.rows) return;
    part.each([&](int j, int column, bool inside) {
      auto e = part.elements(stage, j, column);
      R x[F::kInputs];
      R w[Part::E::kWeights];
      R dy[F::kOutputs];
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        R dx[F::kInputs];
        R dw[kGradients] = {};
        e.get(k, x, w);
        e.get_outputs(k, dy);
        F::backward(x, w, of_part, dy, dx, dw);
        for (int n = 0; n < F::kInputs; ++n) e.in[n][k] = from_compute<T>(dx[n]);
        for (int n = 0; n < kGradients; ++n) dparameters[j][n][k] += dw[n];
      }
      if (!inside) return;
#pragma unroll
      for (int n = 0; n < F::kInputs; ++n)
        *reinterpret_cast<Vec<T, kSize>*>(static_cast<T*>(bwd.din[n]) + row * bwd.din_stride[n] +
                                          part.group * args.width + column) = e.in[n];
    });
  });
  if constexpr (kParameterGradients<F> > 0) {
    static_assert(kVectors * kGradients * kSize * 32 * sizeof(R) <= Part::kBytes);
    R* added = reinterpret_cast<R*>(part.vector(0, 0, 0) - threadIdx.x);
    __syncthreads();  // all warps have read their vectors
    for (int turn = 0; turn < part.slots; ++turn) {
      if (turn == part.slot)
        part.each([&](int j, int column, bool inside) {
#pragma unroll
          for (int n = 0; n < kGradients; ++n)
#pragma unroll
            for (int k = 0; k < kSize; ++k) {
              R& sum = added[((j * kGradients + n) * kSize + k) * 32 + part.lane];
              sum = turn > 0 ? sum + dparameters[j][n][k] : dparameters[j][n][k];
              if (turn + 1 == part.slots && inside)
                sums[((part.block * kGradients + n) * args.groups + part.group) * args.width +
                     column + k] = sum;
            }
        });
      __syncthreads();
    }
  }
}

// Rows between two rows of one thread: as many as `blocks` blocks per SM take together.
template <class F>
int64_t rowwise_stride(const Rowwise<F>& args, RowwiseShape shape, int blocks) {
  return std::clamp<int64_t>(blocks * sm_count() * shape.parts_per_block() / args.groups, 1,
                             args.rows);
}

template <class F>
bool rowwise_aligned(const Rowwise<F>& args) {
  const int64_t element = args.dtype == DType::f64 ? 8 : args.dtype == DType::f32 ? 4 : 2;
  bool aligned = is_aligned(args.parameters, 16);
  for (int n = 0; n < F::kInputs; ++n)
    aligned = aligned && is_aligned(args.in[n], 16) && args.row_stride[n] * element % 16 == 0;
  for (int n = 0; n < F::kOutputs; ++n) aligned = aligned && is_aligned(args.out[n], 16);
  return aligned;
}

// Blocks of `threads` threads that an SM holds together.
template <class... Parameters>
int resident_blocks(void (*kernel)(Parameters...), unsigned threads, size_t shared_bytes = 0) {
  int blocks = 0;
  allow_shared_memory(kernel, shared_bytes);
  check_cuda("rowwise", cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, int(threads),
                                                                      shared_bytes));
  return blocks;
}

// Blocks per group, as many as `blocks` blocks per SM.
template <class F>
int64_t warp_part_blocks(const Rowwise<F>& args, int lanes, int blocks) {
  return std::clamp<int64_t>(std::min(blocks, kWarpPartBlocks) * sm_count() / args.groups, 1,
                             ceil_div(args.rows, kWarpPartThreads / lanes));
}
// f(kVectors as a constant, launch) if parts of `width` numbers belong to lanes of warps; launch(
// kernel, bytes, its first arguments…) returns the blocks per group. Returns whether it does.
template <class T, int kSize, class F, class Run>
bool with_warp_parts(const Rowwise<F>& args, Stream stream, Run&& f) {
  const int64_t vectors = args.width / kSize;
  if constexpr (F::kLongParts && kSize > 1 && sizeof(T) < 8) {
    if (vectors <= 32 || vectors > 192) return false;
    const int lanes = vectors > 48 ? 32 : 16;
    const auto launch = [&](auto kernel, size_t bytes, const auto&... arguments) {
      const int64_t blocks =
          warp_part_blocks(args, lanes, resident_blocks(kernel, kWarpPartThreads, bytes));
      launch_kernel(kernel, unsigned(blocks * args.groups), kWarpPartThreads, bytes, stream,
                    arguments..., lanes, blocks * (kWarpPartThreads / lanes));
      return blocks;
    };
    with_constant<3, 6>(vectors > 96 ? 6 : 3, [&](auto count) { f(count, launch); });
    return true;
  }
  return false;
}

template <class F>
bool rowwise_aligned(const RowwiseBackward<F>& bwd) {
  bool aligned = rowwise_aligned(bwd.forward);
  for (const void* dout : bwd.dout) aligned = aligned && is_aligned(dout, 16);
  // gradient_memory() has the strides of the inputs or is contiguous
  for (const void* din : bwd.din) aligned = aligned && is_aligned(din, 16);
  return aligned;
}

template <class F>
size_t workspace_bytes(const RowwiseBackward<F>& bwd) {
  // single elements, which misaligned tensors take, need no more threads than 16 bytes do
  const Rowwise<F>& args = bwd.forward;
  const int64_t element = args.dtype == DType::f64 ? 8 : 4;
  const int64_t size = 16 / (args.dtype == DType::bf16 ? 2 : element);
  const int64_t vectors = args.width % size ? args.width : args.width / size;
  const RowwiseShape shape = rowwise_shape(vectors);
  const int64_t sums = std::max(rowwise_stride(args, shape, int(2048 / shape.block)),
                                F::kLongParts ? warp_part_blocks(args, 32, kWarpPartBlocks) : 0);
  return size_t(sums * kParameterGradients<F> * args.groups * args.width * element);
}

template <class F>
void rowwise(const Rowwise<F>& args, Stream stream) {
  with_vectors(args.dtype, args.width, rowwise_aligned(args), [&]<class T>(T, auto size) {
    const int64_t parts = args.rows * args.groups;
    const auto in_warps = [&](auto count, auto launch) {
      launch(warp_part_forward_kernel<F, T, size(), count()>,
             WarpPart<F, T, size(), count(), false>::kBytes, args);
    };
    if (parts > kFewParts && with_warp_parts<T, size()>(args, stream, in_warps)) return;
    const RowwiseShape shape = rowwise_shape(args.width / size());
    launch_kernel(rowwise_forward_kernel<F, T, size()>,
                  unsigned(ceil_div(parts, shape.parts_per_block())), shape.block, 0, stream, args,
                  int(shape.threads));
  });
}

template <class F>
void rowwise(const RowwiseBackward<F>& bwd, void* workspace, Stream stream) {
  const Rowwise<F>& args = bwd.forward;
  with_vectors(args.dtype, args.width, rowwise_aligned(bwd), [&]<class T>(T, auto size) {
    auto* sums = static_cast<Real<T>*>(workspace);
    const int64_t columns = kParameterGradients<F> * args.groups * args.width;
    const auto in_warps = [&](auto count, auto launch) {
      const int64_t blocks = launch(warp_part_backward_kernel<F, T, size(), count()>,
                                    WarpPart<F, T, size(), count(), true>::kBytes, bwd, sums);
      sum_rows(sums, bwd.dparameters, blocks, columns, stream);
    };
    if (with_warp_parts<T, size()>(args, stream, in_warps)) return;
    const RowwiseShape shape = rowwise_shape(args.width / size());
    const auto kernel = rowwise_backward_kernel<F, T, size()>;
    const int64_t stride = rowwise_stride(args, shape, resident_blocks(kernel, shape.block));
    launch_kernel(kernel, unsigned(ceil_div(stride * args.groups, shape.parts_per_block())),
                  shape.block, 0, stream, bwd, sums, int(shape.threads), stride);
    sum_rows(sums, bwd.dparameters, stride, columns, stream);
  });
}

#define ASSAY_ROWWISE_CUDA(F)                                 \
  template size_t workspace_bytes(const RowwiseBackward<F>&); \
  template void rowwise(const Rowwise<F>&, Stream);           \
  template void rowwise(const RowwiseBackward<F>&, void* workspace, Stream);

}  // namespace assay::ops::cuda
