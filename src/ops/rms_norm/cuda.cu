// The root-mean-square norm on CUDA: a warp a row, read twice, the second time from the first cache. The weight's gradient
// is summed by each warp over the rows it takes, in shared memory, then over warps, then over blocks, always in one order.
#include "ops/cuda.cuh"
#include "ops/rms_norm/kernel.h"

namespace assay::ops::cuda {
namespace {

constexpr int kWarps = 8, kMaxBlocks = 528;

int64_t num_blocks(const RmsNorm& p) { return std::min<int64_t>(kMaxBlocks, ceil_div(p.rows, kWarps)); }

template <class R>
__device__ R over_warp(R x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
__device__ float inverse_root(float x) { return rsqrtf(x); }
__device__ double inverse_root(double x) { return 1 / sqrt(x); }

template <class T, int kWidth>
__global__ void __launch_bounds__(32 * kWarps) forward_kernel(RmsNorm p) {
  using R = Real<T>;
  using Packed = Pack<T, kWidth>;
  const int lane = threadIdx.x % 32;
  const int64_t row = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32, packs = p.width / kWidth;
  if (row >= p.rows) return;
  const auto* x = reinterpret_cast<const Packed*>(static_cast<const T*>(p.x) + row * p.width);
  auto* y = reinterpret_cast<Packed*>(static_cast<T*>(p.y) + row * p.width);
  const R* weight = static_cast<const R*>(p.weight);
  R squares = 0;
  for (int64_t i = lane; i < packs; i += 32) {
    const Packed part = x[i];
    for (int k = 0; k < kWidth; ++k) squares += real(part.at[k]) * real(part.at[k]);
  }
  const R scale = inverse_root(over_warp(squares) / R(p.width) + R(p.eps));
  if (lane == 0) static_cast<R*>(p.scale)[row] = scale;
  for (int64_t i = lane; i < packs; i += 32) {
    Packed part = x[i];
    for (int k = 0; k < kWidth; ++k) part.at[k] = stored<T>(real(part.at[k]) * scale * weight[i * kWidth + k]);
    y[i] = part;
  }
}

// Number j of pack i stands at j of lane i % 32 in group i / 32: a warp touches 32 banks at a time.
template <int kWidth>
__device__ int64_t place(int64_t pack, int k) {
  return (pack / 32 * kWidth + k) * 32 + pack % 32;
}
template <int kWidth>
__host__ __device__ int64_t places(int64_t width) {
  return ceil_div(width / kWidth, 32) * 32 * kWidth;
}

template <class T, int kWidth>
__device__ void backward_row(const RmsNormBackward& q, int64_t row, int lane, Real<T>* dweight) {
  using R = Real<T>;
  using Packed = Pack<T, kWidth>;
  const RmsNorm& p = q.forward;
  const int64_t packs = p.width / kWidth, start = row * p.width;
  const auto* x = reinterpret_cast<const Packed*>(static_cast<const T*>(p.x) + start);
  const auto* dy = reinterpret_cast<const Packed*>(static_cast<const T*>(q.dy) + start);
  auto* dx = reinterpret_cast<Packed*>(static_cast<T*>(q.dx) + start);
  const R* weight = static_cast<const R*>(p.weight);
  const R scale = static_cast<const R*>(p.scale)[row];
  R inner = 0;
  for (int64_t i = lane; i < packs; i += 32) {
    const Packed a = x[i], b = dy[i];
    for (int k = 0; k < kWidth; ++k) {
      const R product = real(a.at[k]) * real(b.at[k]);
      inner += product * weight[i * kWidth + k];
      dweight[place<kWidth>(i, k)] += product * scale;
    }
  }
  const R back = over_warp(inner) * scale * scale * scale / R(p.width);
  for (int64_t i = lane; i < packs; i += 32) {
    Packed a = x[i];
    const Packed b = dy[i];
    for (int k = 0; k < kWidth; ++k) a.at[k] = stored<T>(scale * weight[i * kWidth + k] * real(b.at[k]) - real(a.at[k]) * back);
    dx[i] = a;
  }
}

template <class T, int kWidth>
__global__ void __launch_bounds__(32 * kWarps) backward_kernel(RmsNormBackward q, Real<T>* parts, int warps) {
  using R = Real<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  const RmsNorm& p = q.forward;
  const int64_t size = places<kWidth>(p.width);
  R* all = reinterpret_cast<R*>(shared);
  for (int64_t i = threadIdx.x; i < warps * size; i += blockDim.x) all[i] = 0;
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int64_t row = blockIdx.x * int64_t{warps} + warp; row < p.rows; row += int64_t{warps} * gridDim.x)
    backward_row<T, kWidth>(q, row, lane, all + warp * size);
  __syncthreads();
  for (int64_t column = threadIdx.x; column < p.width; column += blockDim.x) {
    R sum = 0;
    for (int w = 0; w < warps; ++w) sum += all[w * size + place<kWidth>(column / kWidth, int(column % kWidth))];
    parts[blockIdx.x * p.width + column] = sum;
  }
}

// f(a pack's width, as a constant): 16 bytes where rows and pointers allow it.
template <class T, class F>
void with_width(const RmsNorm& p, std::initializer_list<const void*> pointers, F&& f) {
  constexpr int kWidth = 16 / sizeof(T);
  bool wide = p.width % kWidth == 0;
  for (const void* pointer : pointers) wide = wide && reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  wide ? f(std::integral_constant<int, kWidth>()) : f(std::integral_constant<int, 1>());
}

}  // namespace

size_t workspace_bytes(const RmsNormBackward& q) {
  return size_t(num_blocks(q.forward) * q.forward.width) * (q.forward.dtype == DType::f64 ? 8 : 4);
}

void rms_norm(const RmsNorm& p, Stream stream) {
  with_type(p.dtype, [&](auto x) {
    using T = decltype(x);
    with_width<T>(p, {p.x, p.y}, [&](auto width) {
      forward_kernel<T, width()><<<unsigned(ceil_div(p.rows, kWarps)), 32 * kWarps, 0, static_cast<cudaStream_t>(stream)>>>(p);
    });
  });
  check_launch("rms_norm");
}

void rms_norm(const RmsNormBackward& q, void* workspace, Stream stream) {
  const RmsNorm& p = q.forward;
  with_type(p.dtype, [&](auto x) {
    using T = decltype(x);
    auto* parts = static_cast<Real<T>*>(workspace);
    with_width<T>(p, {p.x, q.dy, q.dx}, [&](auto width) {
      const int64_t bytes = places<width()>(p.width) * int64_t(sizeof(Real<T>)), most = 200 << 10;
      if (bytes > most) throw BadInput("rms_norm: rows wider than 50,000 numbers have no gradient on CUDA");
      const int warps = int(std::min<int64_t>(kWarps, most / bytes));
      launch_shared(backward_kernel<T, width()>, unsigned(num_blocks(p)), 32u * unsigned(warps), size_t(warps * bytes),
                    static_cast<cudaStream_t>(stream), q, parts, warps);
    });
    check_launch("rms_norm backward");
    sum_rows(parts, q.dweight, num_blocks(p), p.width, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace assay::ops::cuda
