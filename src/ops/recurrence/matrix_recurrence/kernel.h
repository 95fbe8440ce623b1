#pragma once
// The recurrence of matrix_recurrence.h on raw memory, one step after another, with the state
// in the L1 cache.
//   r_t   = S_{t−1}ᵀ a_t                                                        [B, T, H, V]
//   S_t   = diag(decay_t) S_{t−1} + k_t v_tᵀ + b_t (c_t + e_t ⊙ r_t)ᵀ           [B, H, K, V]
//           Transition::elementwise: (a_t e_tᵀ) ⊙ S_{t−1} in place of b_t (c_t + e_t ⊙ r_t)ᵀ
//   out_t = S_tᵀ q_t,   or  (S_{t−1} + diag(u) k_t v_tᵀ)ᵀ q_t  when u is there  [B, T, H, V]
// Longhorn is Transition::elementwise, and with Transition::rank_one exact; everything else has
// e = 1.
// Gradient, times: README.md.
//
// The forward stores the state at the start of each kChunk steps; the backward computes the
// states between again.
#include "ops/core/kernel.h"

namespace assay::ops {

// The transition of the state, in addition to a decay per key.
enum class Transition { diagonal, rank_one, elementwise };

struct MatrixRecurrenceForward {
  DType dtype;  // dtype of all tensors: f32 or f64
  Transition transition;
  // decay_dim: 1 or key_dim
  int64_t batch;
  int64_t time;
  int64_t heads;
  int64_t key_dim;
  int64_t value_dim;
  int64_t decay_dim;
  // in  [B, T, ·, K]; k, v, absent: 0
  HeadView q;
  HeadView k;
  HeadView v;  // in  [B, T, ·, V]
  // in  [B, T, H, decay_dim]; absent: 1
  HeadView decay;
  // in  [B, T, H, K]
  HeadView a;
  HeadView b;
  // in  [B, T, H, V]; absent: 0 and 1
  HeadView c;
  HeadView e;
  const void* u;              // in  [H, K] or null
  const void* initial_state;  // in  [B, H, K, V]
  void* out;                  // out [B, T, H, V]
  void* final_state;          // out [B, H, K, V]
  // out [B, num_chunks, H, K, V], the state before each chunk; null when no gradient is wanted
  void* chunk_states;
};

struct MatrixRecurrenceBackward {
  // the inputs as they were; out and final_state are not read; chunk_states is
  MatrixRecurrenceForward forward;
  const void* dout;          // in  [B, T, H, V]
  const void* dfinal_state;  // in  [B, H, K, V] or null
  // out [B, T, H, K], by head even where heads share an input; null where absent
  void* dq;
  void* dk;
  void* da;
  void* db;
  void* ddecay;  // out [B, T, H, decay_dim] or null
  // out [B, T, H, V] or null
  void* dv;
  void* dc;
  void* de;
  void* du;              // out [H, K] or null
  void* dinitial_state;  // out [B, H, K, V]
};

// Highway, run-time dispatch. The bits do not depend on the number of threads.
namespace cpu {
constexpr int64_t kStateChunk = 32;
size_t workspace_bytes(const MatrixRecurrenceForward&);
size_t workspace_bytes(const MatrixRecurrenceBackward&);
void matrix_recurrence(const MatrixRecurrenceForward&, void* workspace, const ParallelFor&);
void matrix_recurrence(const MatrixRecurrenceBackward&, void* workspace, const ParallelFor&);
}  // namespace cpu

// On CUDA: chunks of 16 steps as products of bf16 operands on tensor cores, states and
// sums in fp32.
enum class Rule {
  gla,    // nothing of low rank; u may be there
  delta,  // a = −β decay k, b = k, c = β v, and no k vᵀ: the (gated) delta rule
  dplr,   // k vᵀ and b (Sᵀ a)ᵀ
};

struct ChunkedForward {
  Rule rule;
  int64_t batch;
  int64_t time;
  int64_t heads;
  int64_t key_dim;
  int64_t value_dim;
  float scale;  // factor of q
  // in  [B, T, ·, K], [B, T, ·, K], [B, T, ·, V]  bf16, 16-byte aligned rows
  HeadView q;
  HeadView k;
  HeadView v;
  // in  [B, T, ·, K]  bf16, Rule::dplr
  HeadView a;
  HeadView b;
  // in  [B, T, H, 1]  of Rule::delta; of Rule::gla with scalar decays, which then writes β k vᵀ
  HeadView beta;
  HeadView log_decay;  // in  [B, T, H, decay_dim]  ≤ 0, −∞ is exact; absent: 0
  DType decay_dtype;   //     f32 or, where decay_dim is key_dim, bf16
  int64_t decay_dim;   //     1 or key_dim
  const void* u;       // in  [H, K] or null
  DType beta_dtype = DType::f32;
  DType u_dtype = DType::f32;
  const float* skip;           // in  [H] or null: out += skip v; of Rule::gla with scalar decays
  const float* initial_state;  // in  [B, H, K, V] or null
  void* out;                   // out [B, T, H, V]  bf16
  float* final_state;          // out [B, H, K, V]
  // out, chunk_bytes(): what the backward needs where `keeps`, else scratch
  void* chunks;
  bool keeps;
};

struct ChunkedBackward {
  ChunkedForward forward;     // as it was; out and final_state are not read
  HeadView dout;              // in  [B, T, H, V]  bf16
  const float* dfinal_state;  // in  [B, H, K, V] or null
  // out [B, T, key_gradients(), K]  bf16: of so many parts of the heads, each for its own
  void* dq;
  void* dk;
  void* dv;  // out [B, T, H, V]  bf16, by head even where heads share it
  // out [B, T, H, K]  bf16, Rule::dplr; db is null if b is k, and dk is then their gradient
  void* da;
  void* db;
  float* dbeta;      // out [B, T, H], or null
  void* dlog_decay;  // out [B, T, H, decay_dim] in decay_dtype, or null
  // out [chunk_count(), H, K], [chunk_count(), H]: parts of their sums; or null
  float* du;
  float* dskip;
  float* dinitial_state;  // out [B, H, K, V]
};

namespace cuda {
constexpr int kChunkSteps = 16;
constexpr int kScalarChunkSteps = 64;
// The kernels' key sizes are 64, 96, 128 and 256, with a pair of low rank 64 and 128, with u 64:
// the least that holds key_dim, or 0. Their value sizes are multiples of 16, and for whole
// sequences of 64 where decays are scalar; of other rules blocks take 48 or 64 columns of more than
// 64 well.
constexpr int64_t kLargestKey = 256;
int64_t key_size(Rule rule, bool bonus, int64_t key_dim);
int64_t value_size(int64_t value_dim, bool decode, bool scalar);
// Whether the current device is Hopper and the call has one decay per step and head, or none, and
// nothing of low rank: chunks of 64 steps that need no preparation.
bool is_scalar(const ChunkedForward&);
int64_t chunk_count(const ChunkedForward&);    // chunks of all sequences
int64_t key_gradients(const ChunkedForward&);  // H, or a divisor of it where heads share q and k
size_t chunk_bytes(const ChunkedForward&);
size_t workspace_bytes(const ChunkedForward&);
size_t workspace_bytes(const ChunkedBackward&);
void matrix_recurrence(const ChunkedForward&, void* workspace, Stream);
// The forward without chunks, one step after another, for the few steps of decoding; `chunks` and
// `keeps` are not used. Computed in fp32; β, log_decay and u are f32 or bf16, the last two (but for
// scalar decays) with 16-byte aligned rows. It has no `skip` and no β of Rule::gla.
constexpr int kMaxDecodeSteps = 8;
void decode(const ChunkedForward&, Stream);
void matrix_recurrence(const ChunkedBackward&, void* workspace, Stream);
}  // namespace cuda

}  // namespace assay::ops
