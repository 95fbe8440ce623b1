#pragma once
// Root-mean-square norm with a gate, differentiable. Over rows, or over each of `groups` equal
// parts of a row:
//   norm first:  y = x / sqrt(mean x² + eps) ⊙ w ⊙ silu(z)               [RetNet, Sun et al. 2023]
//                or with σ(z) for silu(z)                             [Kimi Linear 2025]
//   gate first:  y = u / sqrt(mean u² + eps) ⊙ w,  u = x ⊙ silu(z)    [Mamba-2, Dao & Gu 2024]
// With s = 1 / sqrt(mean u² + eps), u = x if the norm is first, and g the gradient of s u:
//   du = s (g − s² u mean(g u))
// s is computed again in the backward pass, so that only x, z and w are kept.
#include <string_view>

#include "ops/core/rowwise.h"

namespace at {
class Tensor;
}

namespace assay::ops {

template <bool kGateFirst, bool kSigmoid = false>
struct GatedNorm : RowwiseFormula {
  static constexpr int kInputs = 2;
  static constexpr int kOutputs = 1;
  static constexpr int kParameters = 1;
  static constexpr int kSums = 1;
  static constexpr int kBackwardSums = 1;
  static constexpr bool kLongParts = true;

  template <class R>
  struct Gate {
    R value;
    R slope;
  };
  template <class R>
  ASSAY_FORMULA Gate<R> gate(R z) {
    const R sigmoid = formula::sigmoid(z);
    if (kSigmoid) return {sigmoid, sigmoid * (1 - sigmoid)};
    return {z * sigmoid, sigmoid + z * sigmoid * (1 - sigmoid)};
  }
  template <class R>
  ASSAY_FORMULA R normed(const R* x) {
    return kGateFirst ? x[0] * gate(x[1]).value : x[0];
  }
  template <class R>
  ASSAY_FORMULA void terms(const R* x, const R*, R* t) {
    t[0] = normed(x) * normed(x);
  }
  template <class R>
  ASSAY_FORMULA void finish(R* sum, R width, R eps) {
    sum[0] = formula::rsqrt(sum[0] / width + eps);
  }
  template <class R>
  ASSAY_FORMULA void forward(const R* x, const R* w, const R* sum, R* y) {
    const R unit = normed(x) * sum[0] * w[0];
    y[0] = kGateFirst ? unit : unit * gate(x[1]).value;
  }
  template <class R>
  ASSAY_FORMULA void backward_terms(const R* x, const R* w, const R* dy, R* t) {
    t[0] = dy[0] * w[0] * x[0] * gate(x[1]).value;  // the same term in both orders
  }
  template <class R>
  ASSAY_FORMULA void finish_backward(R* sum, R width, R) {
    sum[1] *= sum[0] * sum[0] * sum[0] / width;
  }
  template <class R>
  ASSAY_FORMULA void backward(const R* x, const R* w, const R* sum, const R* dy, R* dx, R* dw) {
    const Gate<R> g = gate(x[1]);
    const R u = normed(x);
    const R dunit = kGateFirst ? dy[0] : dy[0] * g.value;
    const R du = sum[0] * w[0] * dunit - u * sum[1];
    dx[0] = kGateFirst ? du * g.value : du;
    dx[1] = g.slope * (kGateFirst ? du * x[0] : dy[0] * u * sum[0] * w[0]);
    dw[0] = dunit * u * sum[0];
  }
};
using GateThenNorm = GatedNorm<true>;
using NormThenGate = GatedNorm<false>;
using NormThenSigmoid = GatedNorm<false, true>;

// x, z [..., D] of one shape (fp32, fp64, bf16), weight [D] (fp32; fp64 for fp64) → the shape and
// dtype of x. `gate` is "silu" or, with the norm first, "sigmoid". ValueError naming the argument
// when a shape does not fit.
at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& z, const at::Tensor& weight,
                          double eps, bool gate_first, int64_t groups = 1,
                          std::string_view gate = "silu");
// Reference implementation in plain tensor arithmetic.
at::Tensor gated_rms_norm_reference(const at::Tensor& x, const at::Tensor& z,
                                    const at::Tensor& weight, double eps, bool gate_first,
                                    int64_t groups = 1, std::string_view gate = "silu");

}  // namespace assay::ops
