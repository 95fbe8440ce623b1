#pragma once
// The element-wise parts of Mamba-3's mixer. [Mamba-3 2026, arXiv 2603.15569]
#include "ops/core/rowwise.h"

namespace assay::ops {

// B and C of every head, turned by angles that the steps Δ and the turns add up to. With R(θ)x the
// pairs (2i, 2i + 1) of x turned by θ_i, and g the group of head h:
//   θ_t,h,i = angle_h,i + Σ_{s ≤ t} Δ_s,h turns_s,i     b'_h = R(θ_h)(b_g + bias_h)
//   dot = b'_h·c'_h
// A chunk is `chunk` steps of a sequence, the last one may have fewer.
struct Mamba3Rotate {
  DType dtype;  // of b, c, and the rotated. "real": f64 when dtype is f64, else f32
  int64_t batch;
  int64_t time;
  int64_t groups;
  int64_t heads;
  int64_t state_size;  // N, a multiple of 8 up to 256
  int64_t pairs;       // P ≤ N / 2
  int64_t chunk;
  const void* b;       // in  [B, T, G, N]
  const void* c;       // in  [B, T, G, N]
  const void* biases;  // in  [2, H, N] real: of b, then of c
  const void* steps;   // in  [B, T, H] real
  const void* turns;   // in  [B, T, P] real
  const void* starts;  // in  [B, chunks + 1, H, P] real: θ before each chunk and after the last
  void* rotated_b;     // out [B, T, H, N]
  void* rotated_c;     // out [B, T, H, N]
  void* dot;           // out [B, T, H] real
};

// With v = R(−θ) db', u = v + ddot c and ψ_i = v_{2i+1} b_{2i} − v_{2i} b_{2i+1} for b and for c:
// db and dbias are sums of u over heads and over steps, and dθ_i is ψ_i of b and c together.
// The gradient of Δ_s turns_s is Σ_{t ≥ s} dθ_t. A kernel adds up the steps of a chunk, so what
// later chunks add to dsteps and dturns is missing. Heads of a group may be divided
// into slices(forward) parts.
struct Mamba3RotateBackward {
  Mamba3Rotate forward;    // its outputs are not touched
  const void* drotated_b;  // in  [B, T, H, N]
  const void* drotated_c;  // in  [B, T, H, N]
  const void* ddot;        // in  [B, T, H] real
  void* db;                // out [slices, B, T, G, N] real, to be added up
  void* dc;                // out [slices, B, T, G, N] real
  void* dbiases;           // out [2, H, N] real
  void* dsteps;            // out [B, T, H] real
  void* dturns;            // out [slices · G, B, T, P] real, to be added up
  void* dangles;           // out [B, chunks, H, P] real: Σ dθ of a chunk
};

namespace cuda {
int64_t slices(const Mamba3Rotate&);
size_t workspace_bytes(const Mamba3RotateBackward&);
void mamba3_rotate(const Mamba3Rotate&, Stream);
void mamba3_rotate(const Mamba3RotateBackward&, void* workspace, Stream);
}  // namespace cuda

// y_0 = s x, with one s per part, and y_1 = x: it has memory of its own, so that one kernel adds
// the gradients that come from both.
struct Mamba3Write : RowwiseFormula {
  static constexpr int kInputs = 1;
  static constexpr int kOutputs = 2;
  static constexpr int kStatistics = 1;
  static constexpr bool kStatisticGradients = true;
  static constexpr int kBackwardSums = 1;

  template <class R>
  ASSAY_FORMULA void forward(const R* x, const R* w, const R*, R* y) {
    y[0] = w[0] * x[0];
    y[1] = x[0];
  }
  template <class R>
  ASSAY_FORMULA void backward_terms(const R* x, const R*, const R* dy, R* t) {
    t[0] = dy[0] * x[0];
  }
  template <class R>
  ASSAY_FORMULA void backward(const R*, const R* w, const R*, const R* dy, R* dx, R*) {
    dx[0] = w[0] * dy[0] + dy[1];
  }
};

// y = (x_0 + s x_1) silu(x_2), with one s per part.
struct Mamba3Output : RowwiseFormula {
  static constexpr int kInputs = 3;
  static constexpr int kOutputs = 1;
  static constexpr int kStatistics = 1;
  static constexpr bool kStatisticGradients = true;
  static constexpr int kBackwardSums = 1;

  template <class R>
  ASSAY_FORMULA void forward(const R* x, const R* w, const R*, R* y) {
    y[0] = (x[0] + w[0] * x[1]) * x[2] * formula::sigmoid(x[2]);
  }
  template <class R>
  ASSAY_FORMULA void backward_terms(const R* x, const R*, const R* dy, R* t) {
    t[0] = dy[0] * x[2] * formula::sigmoid(x[2]) * x[1];
  }
  template <class R>
  ASSAY_FORMULA void backward(const R* x, const R* w, const R*, const R* dy, R* dx, R*) {
    const R s = formula::sigmoid(x[2]);
    dx[0] = dy[0] * x[2] * s;
    dx[1] = w[0] * dx[0];
    dx[2] = dy[0] * (x[0] + w[0] * x[1]) * s * (1 + x[2] * (1 - s));
  }
};

}  // namespace assay::ops
