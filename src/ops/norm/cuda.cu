// Norms on CUDA: one warp per part of a row, read again from the L1 cache. The parameters'
// gradients are summed by each warp over the parts it takes, in shared memory, then over warps,
// then over blocks, always in one order.
#include "ops/cuda/math.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/norm/kernel.h"

namespace assay::ops::cuda {
namespace {

constexpr int kWarps = 8;

int64_t num_parts(const Norm& p) { return p.rows * p.groups; }
int64_t num_blocks(const Norm& p) {
  return std::min<int64_t>(4 * sm_count(), ceil_div(num_parts(p), kWarps));
}
int64_t num_parameters(const Norm& p) { return (p.bias ? 2 : 1) * p.groups * p.width; }

// Rounded by itself: the intrinsics keep a product that a holds from becoming part of the addition.
__device__ inline float rounded_sum(float a, float b) { return __fadd_rn(a, b); }
__device__ inline double rounded_sum(double a, double b) { return __dadd_rn(a, b); }
template <class T, int kWidth>
__device__ Vec<T, kWidth> sum_of(Vec<T, kWidth> a, const Vec<T, kWidth>& b) {
  for (int k = 0; k < kWidth; ++k)
    a.at[k] = from_compute<T>(rounded_sum(to_compute(a.at[k]), to_compute(b.at[k])));
  return a;
}

template <class T, int kWidth, bool kCentred>
__global__ void __launch_bounds__(32 * kWarps) forward_kernel(Norm p) {
  using R = Real<T>;
  using Packed = Vec<T, kWidth>;
  griddep_launch_dependents();
  griddep_wait();
  const int lane = threadIdx.x % 32;
  const int64_t part = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32, packs = p.width / kWidth;
  if (part >= p.rows * p.groups) return;
  const auto* x = reinterpret_cast<const Packed*>(static_cast<const T*>(p.x) + part * p.width);
  const auto* added =
      reinterpret_cast<const Packed*>(static_cast<const T*>(p.added) + part * p.width);
  auto* sum = reinterpret_cast<Packed*>(static_cast<T*>(p.sum) + part * p.width);
  auto* y = reinterpret_cast<Packed*>(static_cast<T*>(p.y) + part * p.width);
  const auto at = [&](int64_t i) { return p.added ? sum_of<T, kWidth>(x[i], added[i]) : x[i]; };
  const int64_t first = part % p.groups * p.width;
  const R *weight = static_cast<const R*>(p.weight) + first,
          *bias = kCentred ? static_cast<const R*>(p.bias) + first : nullptr;
  R mean = 0, squares = 0;
  if (kCentred) {
    for (int64_t i = lane; i < packs; i += 32) {
      const Packed some = at(i);
      for (int k = 0; k < kWidth; ++k) mean += to_compute(some.at[k]);
    }
    mean = warp_sum(mean) / R(p.width);
  }
  for (int64_t i = lane; i < packs; i += 32) {
    const Packed some = at(i);
    for (int k = 0; k < kWidth; ++k)
      squares += (to_compute(some.at[k]) - mean) * (to_compute(some.at[k]) - mean);
  }
  const R scale = rsqrt(warp_sum(squares) / R(p.width) + R(p.eps));
  if (lane == 0) static_cast<R*>(p.scale)[part] = scale;
  if (kCentred && lane == 0) static_cast<R*>(p.mean)[part] = mean;
  for (int64_t i = lane; i < packs; i += 32) {
    Packed some = at(i);
    if (p.sum) sum[i] = some;
    for (int k = 0; k < kWidth; ++k) {
      const R unit = (to_compute(some.at[k]) - mean) * scale;
      some.at[k] =
          from_compute<T>(unit * weight[i * kWidth + k] + (kCentred ? bias[i * kWidth + k] : R(0)));
    }
    y[i] = some;
  }
}

// Number j of pack i is at j of lane i % 32 in group i / 32: a warp touches 32 banks at a time.
template <int kWidth>
__device__ int64_t place(int64_t pack, int k) {
  return (pack / 32 * kWidth + k) * 32 + pack % 32;
}
template <int kWidth>
__host__ __device__ int64_t places(int64_t numbers) {
  return ceil_div(numbers / kWidth, 32) * 32 * kWidth;
}

template <class T, int kWidth, bool kCentred>
__device__ void backward_part(const NormBackward& bwd, int64_t part, int lane, Real<T>* dweight,
                              Real<T>* dbias) {
  using R = Real<T>;
  using Packed = Vec<T, kWidth>;
  const Norm& p = bwd.forward;
  const int64_t packs = p.width / kWidth, start = part * p.width, first = part % p.groups * packs;
  const auto* x = reinterpret_cast<const Packed*>(static_cast<const T*>(p.x) + start);
  const auto* dy = reinterpret_cast<const Packed*>(static_cast<const T*>(bwd.dy) + start);
  const auto* dsum = reinterpret_cast<const Packed*>(static_cast<const T*>(bwd.dsum) + start);
  auto* dx = reinterpret_cast<Packed*>(static_cast<T*>(bwd.dx) + start);
  const R* weight = static_cast<const R*>(p.weight) + first * kWidth;
  const R scale = static_cast<const R*>(p.scale)[part],
          mean = kCentred ? static_cast<const R*>(p.mean)[part] : R(0);
  R inner = 0, sum = 0;  // of g x̂ and of g
  for (int64_t i = lane; i < packs; i += 32) {
    const Packed a = x[i], b = dy[i];
    for (int k = 0; k < kWidth; ++k) {
      const R unit = (to_compute(a.at[k]) - mean) * scale, gradient = to_compute(b.at[k]),
              g = gradient * weight[i * kWidth + k];
      inner += g * unit;
      sum += g;
      dweight[place<kWidth>(first + i, k)] += gradient * unit;
      if (kCentred) dbias[place<kWidth>(first + i, k)] += gradient;
    }
  }
  inner = warp_sum(inner) / R(p.width);
  sum = kCentred ? warp_sum(sum) / R(p.width) : R(0);
  for (int64_t i = lane; i < packs; i += 32) {
    Packed a = x[i];
    const Packed b = dy[i];
    for (int k = 0; k < kWidth; ++k) {
      const R unit = (to_compute(a.at[k]) - mean) * scale;
      a.at[k] = from_compute<T>(
          scale * (to_compute(b.at[k]) * weight[i * kWidth + k] - sum - unit * inner));
    }
    if (bwd.dsum) a = sum_of(a, dsum[i]);
    dx[i] = a;
  }
}

template <class T, int kWidth, bool kCentred>
__global__ void __launch_bounds__(32 * kWarps)
    backward_kernel(NormBackward bwd, Real<T>* sums, int warps) {
  using R = Real<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  const Norm& p = bwd.forward;
  const int64_t numbers = p.groups * p.width, size = places<kWidth>(numbers),
                own = (kCentred ? 2 : 1) * size;
  R* all = reinterpret_cast<R*>(shared);
  for (int64_t i = threadIdx.x; i < warps * own; i += blockDim.x) all[i] = 0;
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  R* mine = all + warp * own;
  for (int64_t part = blockIdx.x * int64_t{warps} + warp; part < p.rows * p.groups;
       part += int64_t{warps} * gridDim.x)
    // a parameter is always the same lane's
    backward_part<T, kWidth, kCentred>(bwd, part, lane, mine, mine + size);
  __syncthreads();
  for (int64_t i = threadIdx.x; i < own / size * numbers; i += blockDim.x) {
    const int64_t column = i % numbers;
    const R* from = all + i / numbers * size + place<kWidth>(column / kWidth, int(column % kWidth));
    R sum = 0;
    for (int w = 0; w < warps; ++w) sum += from[w * own];
    sums[blockIdx.x * (own / size * numbers) + i] = sum;
  }
}

// f(a number of T, a pack's width as a constant, is it layer norm): 16 bytes where rows and
// pointers allow it.
template <class F>
void with_case(const Norm& p, std::initializer_list<const void*> pointers, F&& f) {
  with_vectors(p.dtype, p.width, pointers, [&](auto x, auto width) {
    p.bias ? f(x, width, std::true_type()) : f(x, width, std::false_type());
  });
}

}  // namespace

size_t workspace_bytes(const NormBackward& bwd) {
  return size_t(num_blocks(bwd.forward) * num_parameters(bwd.forward)) *
         (bwd.forward.dtype == DType::f64 ? 8 : 4);
}

void norm(const Norm& p, Stream stream) {
  with_case(p, {p.x, p.y, p.added, p.sum}, [&](auto x, auto width, auto centred) {
    launch_pdl(forward_kernel<decltype(x), width(), centred()>,
               unsigned(ceil_div(num_parts(p), kWarps)), 32 * kWarps, 0, stream, p);
  });
}

void norm(const NormBackward& bwd, void* workspace, Stream stream) {
  const Norm& p = bwd.forward;
  with_case(p, {p.x, bwd.dy, bwd.dx, bwd.dsum}, [&](auto x, auto width, auto centred) {
    using R = Real<decltype(x)>;
    auto* sums = static_cast<R*>(workspace);
    const int64_t bytes =
                      (p.bias ? 2 : 1) * places<width()>(p.groups * p.width) * int64_t(sizeof(R)),
                  most = 200 << 10;
    if (bytes > most)
      throw BadInput("norm: rows of " + std::to_string(p.groups * p.width) +
                     " numbers have no gradient on CUDA: " +
                     std::to_string(most / (bytes / places<width()>(p.groups * p.width))) +
                     " at most");
    const int warps = int(std::min<int64_t>(kWarps, most / bytes));
    launch_kernel(backward_kernel<decltype(x), width(), centred()>, unsigned(num_blocks(p)),
                  32u * unsigned(warps), size_t(warps * bytes), stream, bwd, sums, warps);
    sum_rows(sums, bwd.dparameters, num_blocks(p), num_parameters(p), stream);
  });
}

}  // namespace assay::ops::cuda
