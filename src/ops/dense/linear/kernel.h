#pragma once
// y = x Wᵀ + b for few rows x, as in generation: the time is that of reading W once.
//   y_{m,n} = b_n + Σ_k x_{m,k} W_{n,k}        summed in f32, in an order that K alone decides
// On CUDA also of the root-mean-square norm (norm/kernel.h) of rows, with the bits of the two
// operators:
//   s = x + added, rounded        y = norm(s) Wᵀ + b
#include "ops/core/kernel.h"

namespace assay::ops {

struct LinearFewRows {
  DType dtype;  // dtype of x, weight, bias and y: f32 or bf16
  // M, K, N
  int64_t rows;
  int64_t in;
  int64_t out;
  // in  [M, K], [N, K], contiguous
  const void* x;
  const void* weight;
  const void* bias;  // in  [N] or null
  void* y;           // out [M, N], contiguous; gated: [M, N / 2]
  // The rest is of CUDA only.
  bool gated = false;  // y is act(g) ⊙ u with [g, u] the rows above (ops/rowwise/glu/kernel.h)
  double c = 0;
  double a = 0;
  bool weight_at_rest = false;  // it may be read before earlier kernels end (linear.h)
  // The norm, if its weight is not null; the weight is at rest as W is.
  const float* norm_weight = nullptr;  // in  [K]
  double eps = 0;
  const void* added = nullptr;  // in  [M, K] or null
  void* sum = nullptr;          // out [M, K], s, or null
};

// C = A B, or C + A B with `add`, for many rows, summed in f32. The sum of an element goes from the
// first k to the last one, so its bits do not depend on the number of tasks or threads. In bf16, of
// two neighbouring k the second one is first; AMX sums the even and the odd ones of 32 k, and then
// adds both. With AVX-512 BF16 and AMX, denormal numbers count as 0.
struct MatrixProduct {
  DType dtype;  // dtype of A and B: f32 or bf16
  // M, N, K; for bf16, K is even unless only A is transposed
  int64_t rows;
  int64_t columns;
  int64_t depth;
  // in  [M, K], [K, N], contiguous; bf16: 4-byte aligned
  const void* a;
  const void* b;
  // A lies as [K, M]; B lies as [N, K]
  bool a_transposed;
  bool b_transposed;
  DType c_dtype;      // f32 or that of A and B
  void* c;            // out [M, N], contiguous
  bool add;           // for C in f32
  const float* bias;  // in  [N] or null: C = bias + A B, not with `add`
  int64_t tasks;      // parts of the rows of C; usually the number of threads
};

// Highway, run-time dispatch. Tasks compute different outputs in parallel. The bits of a row of
// x Wᵀ do not depend on the other rows or on the number of threads. `workspace` is 64-byte aligned.
namespace cpu {
size_t workspace_bytes(const MatrixProduct&);
void matrix_product(const MatrixProduct&, void* workspace, const ParallelFor&);
size_t workspace_bytes(const LinearFewRows&);
void linear_few_rows(const LinearFewRows&, void* workspace, const ParallelFor&);
}  // namespace cpu
// bf16; M ≤ 64, K a multiple of 8, x and weight 16-byte aligned. The bits of a row depend on that
// row, W and the bias alone. With a norm: M ≤ 2, K ≤ 2048, and its tensors are aligned too.
namespace cuda {
void linear_few_rows(const LinearFewRows&, Stream);
}  // namespace cuda

}  // namespace assay::ops
