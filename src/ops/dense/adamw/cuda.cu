// AdamW on CUDA: one launch for up to 512 tensors, whose addresses are parameters of the kernel.
#include <algorithm>

#include "ops/cuda/launch.cuh"
#include "ops/dense/adamw/kernel.h"

namespace assay::ops::cuda {
namespace {

// numbers of a tensor that one block updates
constexpr int kThreads = 256;
constexpr int kChunk = 16384;
constexpr int kTensors = 512;  // tensors of a launch, at most

struct Launch {
  AdamW args;
  int count;
  unsigned ends[kTensors];  // the block after the last one of each tensor
  AdamWTensor tensors[kTensors];
};
static_assert(sizeof(Launch) <= 32764);  // bytes of parameters that a kernel may have

struct Coefficients {
  float decay;
  float rate;
  float root;
  float beta1;
  float beta2;
  float epsilon;
  float inverse_scale;
};

// The order of operations is that of torch's fused AdamW.
__device__ void update(const Coefficients& c, float gradient, float& x, float& m, float& v) {
  const float g = gradient * c.inverse_scale;
  const float square = g * g;
  m = fmaf(c.beta1, m, fmaf(-c.beta1, g, g));
  v = fmaf(c.beta2, v, fmaf(-c.beta2, square, square));
  x = fmaf(-c.decay, x, x);
  x -= c.rate * m / (sqrtf(v) / c.root + c.epsilon);
}

template <int kWidth>
__device__ void store_rounded(Vec<float, kWidth> numbers, bf16* to) {
  Vec<bf16, kWidth> narrow;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) narrow[k] = __float2bfloat16(numbers[k]);
  *reinterpret_cast<Vec<bf16, kWidth>*>(to) = narrow;
}

// Numbers [begin, end) in vectors of kWidth, of which each thread has several in flight.
template <int kWidth>
__device__ void update_range(const Coefficients& c, const AdamWTensor& tensor, int64_t begin,
                             int64_t end) {
  using Packed = Vec<float, kWidth>;
  constexpr int kFlight = 2;
  bf16* const rounded = static_cast<bf16*>(tensor.rounded);
  const auto packed = [](auto* numbers, int64_t at) {
    return reinterpret_cast<Packed*>(const_cast<float*>(numbers) + at);
  };
  for (int64_t first = begin + threadIdx.x * kWidth; first < end;
       first += kFlight * kThreads * kWidth) {
    Packed g[kFlight];
    Packed x[kFlight];
    Packed m[kFlight];
    Packed v[kFlight];
#pragma unroll
    for (int j = 0; j < kFlight; ++j) {
      // Past the end, the first vector is read again.
      const int64_t next = first + j * kThreads * kWidth;
      const int64_t at = next < end ? next : first;
      g[j] = *packed(tensor.gradient, at);
      x[j] = *packed(tensor.parameter, at);
      m[j] = *packed(tensor.average, at);
      v[j] = *packed(tensor.square, at);
    }
#pragma unroll
    for (int j = 0; j < kFlight; ++j) {
      const int64_t at = first + j * kThreads * kWidth;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) update(c, g[j][k], x[j][k], m[j][k], v[j][k]);
      if (at < end) {
        *packed(tensor.parameter, at) = x[j];
        *packed(tensor.average, at) = m[j];
        *packed(tensor.square, at) = v[j];
        if (rounded) store_rounded<kWidth>(x[j], rounded + at);
      }
    }
  }
}

__device__ bool is_aligned_to_vectors(const AdamWTensor& t) {
  const auto bits = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
  return (bits(t.parameter) | bits(t.gradient) | bits(t.average) | bits(t.square)) % 16 == 0 &&
         bits(t.rounded) % 8 == 0;
}

__global__ void __launch_bounds__(kThreads, 4) adamw_kernel(const __grid_constant__ Launch launch) {
  if (*launch.args.broken == 1) return;
  // the first tensor that ends after this block
  int low = 0;
  int high = launch.count - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (launch.ends[middle] > blockIdx.x) high = middle;
    else low = middle + 1;
  }
  const AdamWTensor tensor = launch.tensors[low];
  const unsigned first_block = low ? launch.ends[low - 1] : 0;
  const int64_t begin = int64_t(blockIdx.x - first_block) * kChunk;
  const int64_t end = min(begin + kChunk, tensor.size);
  const int64_t whole = is_aligned_to_vectors(tensor) ? end - end % 4 : begin;
  const Coefficients c{launch.args.decay,       launch.args.rate,  launch.args.root,
                       launch.args.beta1,       launch.args.beta2, launch.args.epsilon,
                       1.f / *launch.args.scale};
  update_range<4>(c, tensor, begin, whole);
  update_range<1>(c, tensor, whole, end);
}

}  // namespace

void adamw(const AdamW& args, Stream stream) {
  for (int64_t first = 0; first < args.count; first += kTensors) {
    Launch launch{.args = args, .count = int(std::min<int64_t>(kTensors, args.count - first))};
    unsigned blocks = 0;
    for (int i = 0; i < launch.count; ++i) {
      launch.tensors[i] = args.tensors[first + i];
      launch.ends[i] = blocks += unsigned(ceil_div(launch.tensors[i].size, kChunk));
    }
    if (blocks) launch_kernel(adamw_kernel, blocks, kThreads, 0, stream, launch);
  }
}

}  // namespace assay::ops::cuda
