#pragma once
// A token mixed with the one before it, in several proportions at once.
// [RWKV: Peng et al. 2024; 2025]
//   y_i[t] = x[t] + (x[t−1] − x[t]) ⊙ m_i[t]          m_i[t] = mix_i, or mix_i + own_i[t]
#include "ops/core/kernel.h"

namespace assay::ops {

constexpr int kMaxShifts = 6;

struct TokenShift {
  DType dtype;  // dtype of x, before, own, y. "real": f64 when dtype is f64, else f32
  // any; all tensors contiguous
  int64_t batch;
  int64_t time;
  int64_t width;
  int64_t count;                // number of the y_i, up to kMaxShifts
  const void* x;                // in  [B, T, D]
  const void* before;           // in  [B, D], x[−1]; null: 0
  const void* mix;              // in  [count, D] real
  const void* own[kMaxShifts];  // in  [B, T, D] each; null: absent, all or none
  void* y[kMaxShifts];          // out [B, T, D] each; backward: not touched
};
struct TokenShiftBackward {
  TokenShift forward;
  const void* dy[kMaxShifts];  // in  [B, T, D]
  void* dx;                    // out [B, T, D]
  void* down[kMaxShifts];      // out [B, T, D]; null where own is
  // out [runs, count, D] real: what each run of positions adds to the gradient
  void* dmix;
};

// A task, of the forward too, is a run of a sequence's positions, for all columns (CPU) or
// a few (CUDA).
constexpr int64_t kShiftRun = 32;
inline int64_t runs_of_sequence(const TokenShift& args) {
  return (args.time + kShiftRun - 1) / kShiftRun;
}

namespace cpu {
void token_shift(const TokenShift&, const ParallelFor&);
void token_shift(const TokenShiftBackward&, const ParallelFor&);
}  // namespace cpu
namespace cuda {
void token_shift(const TokenShift&, Stream);
void token_shift(const TokenShiftBackward&, Stream);
}  // namespace cuda

}  // namespace assay::ops
