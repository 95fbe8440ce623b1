#pragma once
// Row-wise operators: element-wise formulas whose elements may also depend on sums over their part
// of a row, such as a head. An operator is a struct F : RowwiseFormula with the constants
//   kInputs, kOutputs, kParameters    tensors [rows, groups, width]; parameters [groups, width]
//   kRealOutputs                      the first of the outputs, which are "real" instead of `dtype`
//   kStatistics                       tensors [rows, groups] real, which a formula gets after w
//   kStatisticGradients               the last backward sums are the gradients of the statistics
//   kSums, kBackwardSums              sums over a part, for both directions and for the second only
//   kExtraGradients                   gradients [groups, width] after those of the parameters
//   kLongParts                        parts are often longer than 512 bytes: more kernels for CUDA
// and functions of one element for R float and double, all ASSAY_FORMULA:
//   terms(x, w, t)                    t[kSums]: what the element adds to each sum
//   finish(sum, width, eps)           changes the sums of a part in place, once per part
//   forward(x, w, sum, y)
//   backward_terms(x, w, dy, t)       t[kBackwardSums]; these sums are those after the first kSums
//   finish_backward(sum, width, eps)  after finish()
//   backward(x, w, sum, dy, dx, dw)   dw: what the element adds to the gradients of parameters
// terms() and backward_terms() of zeros are zeros. cpu.cc and cuda.cu of an operator instantiate
// the kernels below, and its op.cc calls rowwise() of rowwise_op.h.
#include <bit>
#include <cmath>

#include "ops/core/kernel.h"

#ifdef __CUDACC__
#define ASSAY_FORMULA __host__ __device__ __forceinline__ static
#else
#define ASSAY_FORMULA __attribute__((always_inline)) static inline
#endif

namespace assay::ops {

#ifdef __CUDACC__
namespace cuda {
__device__ inline float sigmoid_approx(float x);  // in cuda/math.cuh
}
#endif

struct RowwiseFormula {
  static constexpr int kParameters = 0;
  static constexpr int kRealOutputs = 0;
  static constexpr int kStatistics = 0;
  static constexpr bool kStatisticGradients = false;
  static constexpr int kSums = 0;
  static constexpr int kBackwardSums = 0;
  static constexpr int kExtraGradients = 0;
  static constexpr bool kLongParts = false;

  template <class R>
  ASSAY_FORMULA void terms(const R*, const R*, R*) {}
  template <class R>
  ASSAY_FORMULA void finish(R*, R, R) {}
  template <class R>
  ASSAY_FORMULA void backward_terms(const R*, const R*, const R*, R*) {}
  template <class R>
  ASSAY_FORMULA void finish_backward(R*, R, R) {}
};
template <class F>
constexpr int kParameterGradients = F::kParameters + F::kExtraGradients;
// The size of an array that may have no element: C++ has no array of size 0.
template <int kCount>
constexpr int kAtLeastOne = kCount > 0 ? kCount : 1;

template <class F>
struct Rowwise {
  DType dtype;  // dtype of inputs and outputs. "real": f64 when dtype is f64, else f32
  // any; a row has groups · width numbers
  int64_t rows;
  int64_t groups;
  int64_t width;
  double eps;
  const void* in[F::kInputs];                           // in  [rows, groups, width]
  int64_t row_stride[F::kInputs];                       // from row to row, in elements
  const void* parameters;                               // in  [kParameters, groups, width] real
  const void* statistics[kAtLeastOne<F::kStatistics>];  // in  [rows, groups] real
  void* out[F::kOutputs];  // out [rows, groups, width]; backward: not touched
};
template <class F>
struct RowwiseBackward {
  Rowwise<F> forward;
  const void* dout[F::kOutputs];   // in  [rows, groups, width], dtypes of the outputs
  void* din[F::kInputs];           // out [rows, groups, width]
  int64_t din_stride[F::kInputs];  // from row to row, in elements
  // out [kParameterGradients, groups, width] real; the order of their sums depends on the sizes
  // and the device
  void* dparameters;
  void* dstatistics[kAtLeastOne<F::kStatistics>] = {};  // out [rows, groups] real, if any
};

namespace cpu {
template <class F>
size_t workspace_bytes(const RowwiseBackward<F>&);
template <class F>
void rowwise(const Rowwise<F>&, const ParallelFor&);
template <class F>
void rowwise(const RowwiseBackward<F>&, void* workspace, const ParallelFor&);
}  // namespace cpu
namespace cuda {
constexpr int64_t kMaxRowwiseThreads = 512;  // threads per part, each with 16 bytes or one element
template <class F>
size_t workspace_bytes(const RowwiseBackward<F>&);
template <class F>
void rowwise(const Rowwise<F>&, Stream);
template <class F>
void rowwise(const RowwiseBackward<F>&, void* workspace, Stream);
}  // namespace cuda

// Functions for formulas. On the CPU they are arithmetic that the compiler can vectorise.
namespace formula {

ASSAY_FORMULA float exp(float x) {
#ifdef __CUDA_ARCH__
  return __expf(x);
#else
  // 2^y: adding 1.5 · 2^23 leaves the integer part of y in the low bits; 1.1e-7 relative error
  const float y = x * 1.44269504f;
  const float clamped = y < -126 ? -126 : y > 127 ? 127 : y;
  const float shifted = clamped + 12582912;
  const float f = clamped - (shifted - 12582912);
  float p = f * 0.0013264727f + 0.009671513f;
  p = f * p + 0.055507336f;
  p = f * p + 0.24022242f;
  p = f * p + 0.693147f;
  p = f * p + 1;
  const auto exponent = std::bit_cast<uint32_t>(shifted) << 23;
  const float power = std::bit_cast<float>(std::bit_cast<uint32_t>(p) + exponent);
  return x == x ? power : x;
#endif
}
ASSAY_FORMULA double exp(double x) {
#ifdef __CUDA_ARCH__
  return ::exp(x);
#else
  const double y = x * 1.44269504088896341;
  const double clamped = y < -1022 ? -1022 : y > 1023 ? 1023 : y;
  const double shifted = clamped + 6755399441055744;
  const double f = clamped - (shifted - 6755399441055744);
  double p = 1;
  for (int k = 13; k > 0; --k) p = p * (f * (0.693147180559945309 / k)) + 1;
  const auto exponent = std::bit_cast<uint64_t>(shifted) << 52;
  const double power = std::bit_cast<double>(std::bit_cast<uint64_t>(p) + exponent);
  return x == x ? power : x;
#endif
}

ASSAY_FORMULA float rsqrt(float x) {
#ifdef __CUDA_ARCH__
  return rsqrtf(x);
#else
  return 1 / std::sqrt(x);
#endif
}
ASSAY_FORMULA double rsqrt(double x) { return 1 / std::sqrt(x); }

template <class R>
ASSAY_FORMULA R sigmoid(R x) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(R) == 4) return cuda::sigmoid_approx(x);
#endif
  return 1 / (1 + exp(-x));
}

// log(1 + exp(x)) as max(x, 0) + log(1 + e), e = exp(−|x|). log(1 + e) is 2 artanh(e / (2 + e)),
// whose series has no cancellation.
template <class R>
ASSAY_FORMULA R softplus(R x) {
  constexpr int kLastTerm = sizeof(R) == 4 ? 6 : 16;
  const R e = exp(x < 0 ? x : -x);
  const R s = e / (2 + e);
  R sum = 0;
#pragma unroll
  for (int n = kLastTerm; n >= 0; --n) sum = sum * (s * s) + R(1) / R(2 * n + 1);
  return (x > 0 ? x : 0) + 2 * s * sum;
}

}  // namespace formula
}  // namespace assay::ops
