#pragma once
// The element-wise parts of RWKV-7's time mix around its recurrence, differentiable [Peng et al.
// 2025, §4]. Rows are tokens, and parts of a row are heads.
#include "ops/core/rowwise.h"

namespace assay::ops {

constexpr double kRwkv7Eps = 1e-12;

// Formulas for the projections d, e and k, with parameters k_k and k_a:
//   ln w = −exp(−½) σ(d)   k' = k ⊙ (1 + (a − 1) ⊙ k_a), a = σ(e)
//   κ = q / max(‖q‖, eps), q = k ⊙ k_k
// The outputs are ln w, k', −κ and κ ⊙ a. With G the gradient of κ: dq = s (G − s² q Σ(G q)), s = 1
// / ‖q‖.
struct Rwkv7Prepare : RowwiseFormula {
  static constexpr int kInputs = 3;
  static constexpr int kOutputs = 4;
  static constexpr int kRealOutputs = 1;
  static constexpr int kParameters = 2;
  static constexpr int kSums = 1;
  static constexpr int kBackwardSums = 1;
  static constexpr double kDecay = -0.60653065971263342;  // −exp(−½)

  template <class R>
  ASSAY_FORMULA void terms(const R* x, const R* w, R* t) {
    t[0] = x[2] * w[0] * (x[2] * w[0]);
  }
  template <class R>
  ASSAY_FORMULA void finish(R* sum, R, R eps) {
    sum[0] = sum[0] > eps * eps ? formula::rsqrt(sum[0]) : 1 / eps;
  }
  template <class R>
  ASSAY_FORMULA void forward(const R* x, const R* w, const R* sum, R* y) {
    const R a = formula::sigmoid(x[1]);
    const R removed = x[2] * w[0] * sum[0];
    y[0] = R(kDecay) * formula::sigmoid(x[0]);
    y[1] = x[2] * (1 + (a - 1) * w[1]);
    y[2] = -removed;
    y[3] = removed * a;
  }
  template <class R>
  ASSAY_FORMULA void backward_terms(const R* x, const R* w, const R* dy, R* t) {
    t[0] = (dy[3] * formula::sigmoid(x[1]) - dy[2]) * x[2] * w[0];
  }
  template <class R>
  ASSAY_FORMULA void finish_backward(R* sum, R, R eps) {
    sum[1] = sum[0] * eps < 1 ? sum[1] * sum[0] * sum[0] * sum[0] : 0;
  }
  template <class R>
  ASSAY_FORMULA void backward(const R* x, const R* w, const R* sum, const R* dy, R* dx, R* dw) {
    const R decay = formula::sigmoid(x[0]);
    const R a = formula::sigmoid(x[1]);
    const R q = x[2] * w[0];
    const R dq = sum[0] * (dy[3] * a - dy[2]) - q * sum[1];
    const R da = dy[1] * x[2] * w[1] + dy[3] * q * sum[0];
    dx[0] = dy[0] * R(kDecay) * decay * (1 - decay);
    dx[1] = da * a * (1 - a);
    dx[2] = dq * w[0] + dy[1] * (1 + (a - 1) * w[1]);
    dw[0] = dq * x[2];
    dw[1] = dy[1] * x[2] * (a - 1);
  }
};

// y = v + (v_first − v) ⊙ σ(m)
struct Rwkv7Values : RowwiseFormula {
  static constexpr int kInputs = 3;
  static constexpr int kOutputs = 1;

  template <class R>
  ASSAY_FORMULA void forward(const R* x, const R*, const R*, R* y) {
    y[0] = x[0] + (x[1] - x[0]) * formula::sigmoid(x[2]);
  }
  template <class R>
  ASSAY_FORMULA void backward(const R* x, const R*, const R*, const R* dy, R* dx, R*) {
    const R share = formula::sigmoid(x[2]);
    dx[0] = dy[0] * (1 - share);
    dx[1] = dy[0] * share;
    dx[2] = dy[0] * (x[1] - x[0]) * share * (1 - share);
  }
};

// y = (n + b v) ⊙ g, b = Σ r ⊙ k ⊙ r_k, of the inputs n, r, k, v and g. With c = Σ dy ⊙ g ⊙ v:
// dr = c k ⊙ r_k, dk = c r ⊙ r_k, dr_k = c r ⊙ k, dv = b dy ⊙ g.
struct Rwkv7Output : RowwiseFormula {
  static constexpr int kInputs = 5;
  static constexpr int kOutputs = 1;
  static constexpr int kParameters = 1;
  static constexpr int kSums = 1;
  static constexpr int kBackwardSums = 1;

  template <class R>
  ASSAY_FORMULA void terms(const R* x, const R* w, R* t) {
    t[0] = x[1] * x[2] * w[0];
  }
  template <class R>
  ASSAY_FORMULA void forward(const R* x, const R*, const R* sum, R* y) {
    y[0] = (x[0] + sum[0] * x[3]) * x[4];
  }
  template <class R>
  ASSAY_FORMULA void backward_terms(const R* x, const R*, const R* dy, R* t) {
    t[0] = dy[0] * x[4] * x[3];
  }
  template <class R>
  ASSAY_FORMULA void backward(const R* x, const R* w, const R* sum, const R* dy, R* dx, R* dw) {
    dx[0] = dy[0] * x[4];
    dx[1] = sum[1] * x[2] * w[0];
    dx[2] = sum[1] * x[1] * w[0];
    dx[3] = dy[0] * x[4] * sum[0];
    dx[4] = dy[0] * (x[0] + sum[0] * x[3]);
    dw[0] = sum[1] * x[1] * x[2];
  }
};

}  // namespace assay::ops
