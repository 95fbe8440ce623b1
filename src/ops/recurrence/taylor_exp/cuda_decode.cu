// A few steps, one after another, as decoding takes them. A block has a head's state in shared
// memory, where the copy engine brings it as it lies: its rows are odd in length, so only the
// first and last numbers are not in whole groups of 16 bytes. A thread has one of its columns, in
// every n-th row.
#include "ops/cuda/launch.cuh"
#include "ops/cuda/ptx.cuh"
#include "ops/recurrence/taylor_exp/kernel.h"

namespace assay::ops::cuda {
namespace {

constexpr int kThreads = 320;  // wanted in a block
constexpr int kMaxColumns = kMaxTaylorValue + 1;

__device__ inline float load_of_head(const HeadView& x, DType dtype, const TaylorSteps& args,
                                     int64_t t, int64_t width, int64_t i) {
  const unsigned heads = args.heads;
  const unsigned b = blockIdx.x / heads;
  const unsigned h = blockIdx.x % heads;
  return load_scalar(x.rows.data, dtype,
                     b * x.rows.batch_stride + t * x.rows.time_stride +
                         h / (heads / unsigned(x.heads)) * width + i);
}

// Feature f of the query, with its weight, and of the key, from their numbers.
__device__ inline void features(const float* q, const float* k, int K, float scale, int f,
                                float& query, float& key) {
  if (f <= K) {
    query = f == 0 ? 1.f : scale * q[f - 1];
    key = f == 0 ? 1.f : k[f - 1];
    return;
  }
  int i = 0;
  int j = f - 1 - K;
  for (; j >= K - i; ++i) j -= K - i;
  j += i;
  query = (i == j ? 0.5f : 1.f) * scale * scale * q[i] * q[j];
  key = k[i] * k[j];
}

// The numbers of a head's state, of which those from `first` to `last` are whole 16 bytes in the
// tensor and, as far beside 16 bytes, in shared memory.
struct Span {
  int size;
  int first;
  int last;
  __device__ Span(int64_t begin, int count)
      : size(count), first(-begin & 3), last(first + ((size - first) & ~3)) {}
  __device__ uint32_t bytes() const { return uint32_t((last - first) * sizeof(float)); }
  __device__ void copy_ends(float* to, const float* from) const {
    const int thread = threadIdx.x;
    const int i = thread < first ? thread : last + thread - first;
    if (i < size) to[i] = from[i];
  }
};

__global__ void __launch_bounds__(kMaxColumns, 3) decode_kernel(TaylorSteps args, int groups) {
  __shared__ float q[kMaxTaylorKey];
  __shared__ float k[kMaxTaylorKey];
  __shared__ uint64_t word;
  extern __shared__ __align__(16) float memory[];
  const int K = int(args.key_dim);
  const int columns = int(args.value_dim) + 1;
  const int F = 1 + K + K * (K + 1) / 2;
  const int column = threadIdx.x % columns;
  const int group = threadIdx.x / columns;
  const int64_t begin = blockIdx.x * int64_t{F} * columns;
  const Span span(begin, F * columns);
  float* state = memory + begin % 4;
  float* query = memory + F * columns + 4;
  float* key = query + F;
  float* parts = key + F;
  const Mbarrier barrier{&word};
  griddep_launch_dependents();
  if (threadIdx.x == 0) barrier.init(1);
  fence_mbarrier_init();
  __syncthreads();
  griddep_wait();
  if (args.initial_state) {
    const float* from = args.initial_state + begin;
    if (threadIdx.x == 0) {
      barrier.arrive_expect_tx(span.bytes());
      cp_async_bulk(state + span.first, from + span.first, span.bytes(), barrier);
    }
    span.copy_ends(state, from);
  } else {
    for (int i = threadIdx.x; i < F * columns; i += blockDim.x) state[i] = 0;
  }
  for (int64_t t = 0; t < args.time; ++t) {
    if (threadIdx.x < K) {
      q[threadIdx.x] = load_of_head(args.q, args.q_dtype, args, t, K, threadIdx.x);
      k[threadIdx.x] = load_of_head(args.k, args.k_dtype, args, t, K, threadIdx.x);
    }
    const float value = column < args.value_dim
                            ? load_of_head(args.v, args.v_dtype, args, t, args.value_dim, column)
                            : 1.f;
    __syncthreads();
    for (int f = threadIdx.x; f < F; f += blockDim.x)
      features(q, k, K, args.scale, f, query[f], key[f]);
    __syncthreads();
    if (t == 0 && args.initial_state) barrier.wait(0);
    float sum = 0;
    if (group < groups) {
#pragma unroll 8
      for (int f = group; f < F; f += groups) {
        const float S = state[f * columns + column] += key[f] * value;
        sum += query[f] * S;
      }
      parts[threadIdx.x] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= args.value_dim) continue;
    float out = 0;
    float weights = 0;
    for (int g = 0; g < groups; ++g) {
      out += parts[g * columns + column];
      weights += parts[(g + 1) * columns - 1];
    }
    if (args.normalize) out /= weights + args.eps;
    const unsigned heads = args.heads;
    const unsigned b = blockIdx.x / heads;
    const unsigned h = blockIdx.x % heads;
    const int64_t at = ((b * args.time + t) * args.heads + h) * args.value_dim + column;
    if (args.q_dtype == DType::bf16) static_cast<bf16*>(args.out)[at] = from_compute<bf16>(out);
    else static_cast<float*>(args.out)[at] = out;
  }
  fence_proxy_async();
  __syncthreads();
  float* to = args.final_state + begin;
  span.copy_ends(to, state);
  if (threadIdx.x == 0) cp_async_bulk_store(to + span.first, state + span.first, span.bytes());
}

}  // namespace

void decode(const TaylorSteps& args, Stream stream) {
  const int columns = int(args.value_dim) + 1;
  const int groups = std::max(1, kThreads / columns);
  const auto threads = unsigned(ceil_div(groups * columns, 32)) * 32;
  const size_t shared =
      size_t(feature_count(args.key_dim) * (columns + 2) + 4 + groups * columns) * sizeof(float);
  launch_pdl(decode_kernel, unsigned(args.batch * args.heads), threads, shared, stream, args,
             groups);
}

}  // namespace assay::ops::cuda
