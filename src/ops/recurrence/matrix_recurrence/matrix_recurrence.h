#pragma once
// The recurrence of every operator whose state is a matrix per head.
//   S_t   = diag(decay_t) S_{t−1} + k_t v_tᵀ + b_t (c_t + e_t ⊙ S_{t−1}ᵀ a_t)ᵀ       [B, H, K, V]
//         Transition::elementwise: (a_t e_tᵀ) ⊙ S_{t−1} in place of b_t (c_t + e_t ⊙ S_{t−1}ᵀ a_t)ᵀ
//   out_t = S_tᵀ q_t,   or  (S_{t−1} + diag(u) k_t v_tᵀ)ᵀ q_t  when u is there       [B, T, H, V]
// docs/operators.md says which operator is which case of it; README.md derives the ways
// to compute it.
#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "ops/recurrence/matrix_recurrence/kernel.h"
#include "ops/recurrence/recurrence_reference.h"

namespace assay::ops {

// As an op has them, in any floating-point dtype; those with fewer heads than H are shared
// as steps.h says.
struct MatrixRecurrence {
  Transition transition = Transition::diagonal;
  double scale = 1;  // factor of q
  at::Tensor q;      // [B, T, ·, K]
  // [B, T, ·, K], [B, T, ·, V]; undefined: nothing is written but by b
  at::Tensor k;
  at::Tensor v;
  // [B, T, H, K] or [B, T, H, 1]; ≤ 0 for a state that does not grow, −∞ is exact; undefined: 0
  at::Tensor log_decay;
  // [B, T, ·, K]; b undefined when diagonal
  at::Tensor a;
  at::Tensor b;
  // [B, T, ·, V]; undefined: 0 and 1
  at::Tensor c;
  at::Tensor e;
  at::Tensor u;  // [H, K]
  // [B, T, H, 1]: the delta rule of k and v, in place of k vᵀ: a = −β decay k, b = k, c = β v
  at::Tensor beta;
  at::Tensor rate;   // [B, T, H, 1]: rate k vᵀ is written
  at::Tensor skip;   // [H]: out += skip v
  at::Tensor decay;  // in place of log_decay
};
// The recurrence's own terms: q scaled, v times `rate`, `decay`, no `log_decay`, `beta` and `skip`;
// all in `real`.
MatrixRecurrence expanded(const MatrixRecurrence& steps, at::ScalarType real);

// From the op's own arguments to the recurrence's, for any piece of time; in
// differentiable tensor arithmetic.
using Prepare = std::function<MatrixRecurrence(const std::vector<at::Tensor>& arguments)>;

// out [B, T, H, V] and the state after the last step, in the dtype of `initial_state` [B, H, K, V].
// `arguments` as scan_with_recompute takes them. On the device "meta" empty results; on the
// CPU the kernel;
// on CUDA the tensor cores' where they serve, else `chunked` in segments, which has no
// Transition::elementwise and no e. bf16 sequences may give `out` in bf16.
std::tuple<at::Tensor, at::Tensor> recurrence(const Prepare& prepare,
                                              const std::vector<at::Tensor>& arguments,
                                              const at::Tensor& initial_state, int64_t time,
                                              int64_t chunk_size = 64);
HeadView heads(const at::Tensor& x);  // [B, T, G, D]; absent when undefined
// The gradient [B, T, H, D] of an input whose heads several heads share: for each of its heads the
// sum of theirs.
at::Tensor sum_of_sharers(const at::Tensor& gradient, const at::Tensor& input);
// The paths that recurrence() takes.
bool register_matrix_recurrence(const std::string& op, int cuda_numerics = 2, int cpu_numerics = 1,
                                const std::string& key_sizes = "up to 256");

// The kernels of kernel.h, "On CUDA": bf16 sequences, float32 state; sizes between theirs are
// zero-padded (of delta rules for the few steps of decoding only).
bool on_tensor_cores(const MatrixRecurrence& steps, const at::Tensor& state);
std::tuple<at::Tensor, at::Tensor> by_tensor_cores(const MatrixRecurrence& steps,
                                                   const at::Tensor& state);

// The recurrence of expanded steps by chunks of up to chunk_size, a power of two, as batched matrix
// products; any device; through autograd.
std::tuple<at::Tensor, at::Tensor> chunked(const MatrixRecurrence& steps, const at::Tensor& state,
                                           int64_t chunk_size);

}  // namespace assay::ops
