#pragma once
// Row-wise operators on CUDA: each thread has 16 bytes of a part of a row. A part of up to 32
// vectors belongs to lanes of one warp, a longer one to a block. cuda.cu of an operator
// instantiates the three functions for its struct.
#include "ops/cuda/reduce.cuh"
#include "ops/rowwise.h"

namespace assay::ops::cuda {

// Which threads work on a part: `threads` of the `block` threads of a block.
struct RowwiseShape {
  unsigned threads, block;
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
  Vec<R, kSize> parameters[kAtLeastOne<F::kParameters>] = {},
                real[kAtLeastOne<F::kRealOutputs>] = {};
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
  __device__ void load_parameters(const Rowwise<F>& p, int64_t group, int64_t first) {
    const R* from = static_cast<const R*>(p.parameters) + group * p.width + first;
#pragma unroll
    for (int n = 0; n < F::kParameters; ++n)
      parameters[n] = *reinterpret_cast<const Vec<R, kSize>*>(from + n * p.groups * p.width);
  }
  __device__ void load_inputs(const Rowwise<F>& p, int64_t row, int64_t group, int64_t offset) {
    for (int n = 0; n < F::kStatistics; ++n)
      statistics[n] = static_cast<const R*>(p.statistics[n])[row * p.groups + group];
#pragma unroll
    for (int n = 0; n < F::kInputs; ++n)
      in[n] = *reinterpret_cast<const Vec<T, kSize>*>(static_cast<const T*>(p.in[n]) +
                                                      row * p.row_stride[n] + offset);
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
    rowwise_forward_kernel(const __grid_constant__ Rowwise<F> p, int threads) {
  using R = Real<T>;
  using E = RowwiseElements<F, T, kSize>;
  const int64_t wanted =
      blockIdx.x * int64_t(blockDim.x / unsigned(threads)) + threadIdx.x / unsigned(threads);
  const int64_t part = min(wanted, p.rows * p.groups - 1), row = quotient(part, p.groups),
                group = part - row * p.groups, first = threadIdx.x % unsigned(threads) * kSize,
                offset = group * p.width + first;
  E e;
  R x[F::kInputs], w[E::kWeights], y[F::kOutputs], sums[kAtLeastOne<F::kSums>] = {};
  if (first < p.width) {
    e.load_inputs(p, row, group, offset);
    e.load_parameters(p, group, first);
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
    F::finish(sums, R(p.width), R(p.eps));
  }
#pragma unroll
  for (int k = 0; k < kSize; ++k) {
    e.get(k, x, w);
    F::forward(x, w, sums, y);
    e.set_outputs(k, y);
  }
  if (part < wanted || first >= p.width) return;
  const int64_t to = row * p.groups * p.width + offset;
  e.for_each_output(p.out, [&](auto& vector, auto* out) {
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
  const Rowwise<F>& p = bwd.forward;
  const int64_t worker = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / threads,
                step = worker / p.groups, group = worker % p.groups,
                first = threadIdx.x % threads * kSize, offset = group * p.width + first;
  const bool has_elements = first < p.width && step < stride;
  E e;
  if (has_elements) e.load_parameters(p, group, first);
  R dparameters[E::kGradients][kSize] = {};
  // the number of rounds is that of all threads, because they add together
  for (int64_t start = 0; start < p.rows; start += stride) {
    const int64_t row = start + step, at = row * p.groups * p.width + offset;
    const bool active = has_elements && row < p.rows;
    R x[F::kInputs], w[E::kWeights], dy[F::kOutputs], part[kAtLeastOne<kSums>] = {};
    if (active) {
      e.load_inputs(p, row, group, offset);
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
      F::finish(part, R(p.width), R(p.eps));
      F::finish_backward(part, R(p.width), R(p.eps));
    }
    if (!active) continue;
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      R dx[F::kInputs], dw[E::kGradients] = {};
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
      sums[(step * kParameterGradients<F> + n) * p.groups * p.width + offset + k] =
          dparameters[n][k];
}

// Rows between two rows of one thread: as many as `blocks` blocks per SM take together.
template <class F>
int64_t rowwise_stride(const Rowwise<F>& p, RowwiseShape shape, int blocks) {
  return std::clamp<int64_t>(blocks * sm_count() * shape.parts_per_block() / p.groups, 1, p.rows);
}

template <class F>
bool rowwise_aligned(const Rowwise<F>& p) {
  const int64_t element = p.dtype == DType::f64 ? 8 : p.dtype == DType::f32 ? 4 : 2;
  bool aligned = is_aligned(p.parameters, 16);
  for (int n = 0; n < F::kInputs; ++n)
    aligned = aligned && is_aligned(p.in[n], 16) && p.row_stride[n] * element % 16 == 0;
  for (int n = 0; n < F::kOutputs; ++n) aligned = aligned && is_aligned(p.out[n], 16);
  return aligned;
}

template <class F>
size_t workspace_bytes(const RowwiseBackward<F>& bwd) {
  // single elements, which misaligned tensors take, need no more threads than 16 bytes do
  const Rowwise<F>& p = bwd.forward;
  const int64_t element = p.dtype == DType::f64 ? 8 : 4,
                size = 16 / (p.dtype == DType::bf16 ? 2 : element),
                vectors = p.width % size ? p.width : p.width / size;
  const RowwiseShape shape = rowwise_shape(vectors);
  return size_t(rowwise_stride(p, shape, int(2048 / shape.block)) * kParameterGradients<F> *
                p.groups * p.width * element);
}

template <class F>
void rowwise(const Rowwise<F>& p, Stream stream) {
  with_vectors(p.dtype, p.width, rowwise_aligned(p), [&]<class T>(T, auto size) {
    const RowwiseShape shape = rowwise_shape(p.width / size());
    launch_kernel(rowwise_forward_kernel<F, T, size()>,
                  unsigned(ceil_div(p.rows * p.groups, shape.parts_per_block())), shape.block, 0,
                  stream, p, int(shape.threads));
  });
}

template <class F>
void rowwise(const RowwiseBackward<F>& bwd, void* workspace, Stream stream) {
  const Rowwise<F>& p = bwd.forward;
  bool aligned = rowwise_aligned(p);
  for (const void* dout : bwd.dout) aligned = aligned && is_aligned(dout, 16);
  // gradient_memory() has the strides of the inputs or is contiguous
  for (const void* din : bwd.din) aligned = aligned && is_aligned(din, 16);
  with_vectors(p.dtype, p.width, aligned, [&]<class T>(T, auto size) {
    auto* sums = static_cast<Real<T>*>(workspace);
    const RowwiseShape shape = rowwise_shape(p.width / size());
    const auto kernel = rowwise_backward_kernel<F, T, size()>;
    int blocks = 0;  // that an SM holds together
    check_cuda("rowwise",
               cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, int(shape.block), 0));
    const int64_t stride = rowwise_stride(p, shape, blocks);
    launch_kernel(kernel, unsigned(ceil_div(stride * p.groups, shape.parts_per_block())),
                  shape.block, 0, stream, bwd, sums, int(shape.threads), stride);
    sum_rows(sums, bwd.dparameters, stride, kParameterGradients<F> * p.groups * p.width, stream);
  });
}

#define ASSAY_ROWWISE_CUDA(F)                                 \
  template size_t workspace_bytes(const RowwiseBackward<F>&); \
  template void rowwise(const Rowwise<F>&, Stream);           \
  template void rowwise(const RowwiseBackward<F>&, void* workspace, Stream);

}  // namespace assay::ops::cuda
