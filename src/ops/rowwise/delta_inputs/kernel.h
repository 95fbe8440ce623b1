#pragma once
// The inputs of a delta rule with a decay per channel, differentiable. [Kimi Linear 2025, §4; Gated
// DeltaNet-2, arXiv 2605.22791] Rows are tokens, and parts of a row are heads.
//   q̂ = q / sqrt(Σ q² + eps)     k̂ = k / sqrt(Σ k² + eps)     a = f + bias
//   g = −rate softplus(a), or with a bound below 0: bound σ(rate a)
// The outputs are g, q̂, and
//   KdaInputs…   β k̂ and −exp(g) k̂                       β: one per head
//   Gdn2Inputs   k̂ and −scale σ(e) exp(g) k̂              e: one per channel
// With G the gradient of k̂ and s = 1 / sqrt(Σ k² + eps): dk = s (G − s² k Σ(G k)).
#include "ops/core/rowwise.h"

namespace assay::ops {

constexpr double kDeltaInputsEps = 1e-6;

// x: q, k, f and, with kErase, e. w: bias, rate, then the bound or the scale if there is one; the
// statistic β. The sums of the second direction are Σ dq̂ q, Σ R k and Σ W k, with R and W the
// gradients of removed, times its factor of −k̂, and of written. The last sum gives dβ.
template <bool kBounded, bool kErase>
struct DeltaInputs : RowwiseFormula {
  static constexpr int kInputs = 3 + kErase;
  static constexpr int kOutputs = 4;
  static constexpr int kRealOutputs = 1;
  static constexpr int kParameters = 2 + (kBounded || kErase);
  static constexpr int kStatistics = !kErase;
  static constexpr bool kStatisticGradients = !kErase;
  static constexpr int kSums = 2;
  static constexpr int kBackwardSums = 3;

  // g and its derivatives by a and the rate; the share of a channel that e erases; removed / −k̂.
  template <class R>
  struct Gates {
    R log_decay;
    R slope;
    R by_rate;
    R erased;
    R factor;
  };
  template <class R>
  ASSAY_FORMULA Gates<R> gates(const R* x, const R* w) {
    Gates<R> g;
    const R a = x[2] + w[0];
    const R share = formula::sigmoid(kBounded ? w[1] * a : a);
    const R limit = kBounded ? w[2] : -w[1];
    const R level = kBounded ? share : formula::softplus(a);
    g.log_decay = limit * level;
    g.slope = kBounded ? limit * share * (1 - share) * w[1] : limit * share;
    g.by_rate = kBounded ? limit * share * (1 - share) * a : -level;
    g.erased = kErase ? formula::sigmoid(x[kInputs - 1]) : R(1);
    g.factor = formula::exp(g.log_decay) * (kErase ? w[kParameters - 1] * g.erased : R(1));
    return g;
  }
  template <class R>
  ASSAY_FORMULA R beta(const R* w) {
    return kErase ? R(1) : w[kParameters];
  }
  template <class R>
  ASSAY_FORMULA void terms(const R* x, const R*, R* t) {
    t[0] = x[0] * x[0];
    t[1] = x[1] * x[1];
  }
  template <class R>
  ASSAY_FORMULA void finish(R* sum, R, R eps) {
    sum[0] = formula::rsqrt(sum[0] + eps);
    sum[1] = formula::rsqrt(sum[1] + eps);
  }
  template <class R>
  ASSAY_FORMULA void forward(const R* x, const R* w, const R* sum, R* y) {
    const Gates<R> g = gates(x, w);
    y[0] = g.log_decay;
    y[1] = x[0] * sum[0];
    y[2] = x[1] * sum[1] * beta(w);
    y[3] = -x[1] * sum[1] * g.factor;
  }
  template <class R>
  ASSAY_FORMULA void backward_terms(const R* x, const R* w, const R* dy, R* t) {
    t[0] = dy[1] * x[0];
    t[1] = dy[3] * gates(x, w).factor * x[1];
    t[2] = dy[2] * x[1];
  }
  template <class R>
  ASSAY_FORMULA void finish_backward(R* sum, R, R) {
    sum[2] *= sum[0] * sum[0] * sum[0];
    sum[3] *= sum[1];
    sum[4] *= sum[1];
  }
  template <class R>
  ASSAY_FORMULA void backward(const R* x, const R* w, const R* sum, const R* dy, R* dx, R* dw) {
    const Gates<R> g = gates(x, w);
    const R unit = x[1] * sum[1];
    const R removed = dy[3] * g.factor;
    const R dlog = dy[0] - removed * unit;
    dx[0] = sum[0] * dy[1] - x[0] * sum[2];
    dx[1] = sum[1] * (beta(w) * dy[2] - removed - unit * (beta(w) * sum[4] - sum[3]));
    dx[2] = dlog * g.slope;
    if (kErase) dx[kInputs - 1] = -removed * unit * (1 - g.erased);
    dw[0] = dx[2];
    dw[1] = dlog * g.by_rate;
    if (kParameters > 2) dw[kParameters - 1] = 0;  // of a constant
  }
};
using KdaInputsUnbounded = DeltaInputs<false, false>;
using KdaInputsBounded = DeltaInputs<true, false>;
using Gdn2Inputs = DeltaInputs<false, true>;

}  // namespace assay::ops
