// Norms on CUDA: one warp per part of a row, read again from the L1 cache. The backward pass is
// row-wise.
#include "ops/cuda/math.cuh"
#include "ops/cuda/rowwise.cuh"
#include "ops/norm/kernel.h"

namespace assay::ops::cuda {
namespace {

constexpr int kWarps = 8;

int64_t num_parts(const Norm& p) { return p.rows * p.groups; }

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
  const auto at = [&](int64_t i) {
    Packed some = x[i];
    if (!p.added) return some;
    const Packed more = added[i];
    for (int k = 0; k < kWidth; ++k)
      some.at[k] = from_compute<T>(to_compute(some.at[k]) + to_compute(more.at[k]));
    return some;
  };
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

// f(a number of T, a pack's width as a constant, is it layer norm): 16 bytes where rows and
// pointers allow it.
template <class F>
void with_case(const Norm& p, std::initializer_list<const void*> pointers, F&& f) {
  with_vectors(p.dtype, p.width, pointers, [&](auto x, auto width) {
    p.bias ? f(x, width, std::true_type()) : f(x, width, std::false_type());
  });
}

template <bool kCentred, bool kSum>
RowwiseBackward<NormGradient<kCentred, kSum>> gradient(const NormBackward& bwd) {
  const Norm& p = bwd.forward;
  RowwiseBackward<NormGradient<kCentred, kSum>> out{
      {p.dtype, p.rows, p.groups, p.width, p.eps, {p.x}, {p.groups * p.width}, p.weight, {p.scale}},
      {bwd.dy},
      {bwd.dx},
      bwd.dparameters};
  if constexpr (kCentred) out.forward.statistics[1] = p.mean;
  if constexpr (kSum) out.dout[1] = bwd.dsum;
  return out;
}
// f(the arguments of the row-wise gradient).
template <class F>
auto with_gradient(const NormBackward& bwd, F&& f) {
  if (bwd.dsum)
    return bwd.forward.bias ? f(gradient<true, true>(bwd)) : f(gradient<false, true>(bwd));
  return bwd.forward.bias ? f(gradient<true, false>(bwd)) : f(gradient<false, false>(bwd));
}

}  // namespace

size_t workspace_bytes(const NormBackward& bwd) {
  return with_gradient(bwd, [](const auto& rows) { return workspace_bytes(rows); });
}

void norm(const Norm& p, Stream stream) {
  with_case(p, {p.x, p.y, p.added, p.sum}, [&](auto x, auto width, auto centred) {
    launch_pdl(forward_kernel<decltype(x), width(), centred()>,
               unsigned(ceil_div(num_parts(p), kWarps)), 32 * kWarps, 0, stream, p);
  });
}

void norm(const NormBackward& bwd, void* workspace, Stream stream) {
  with_gradient(bwd, [&](const auto& rows) { rowwise(rows, workspace, stream); });
}

}  // namespace assay::ops::cuda
