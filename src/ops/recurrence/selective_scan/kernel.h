#pragma once
// Selective scan, the recurrence of Mamba-1: a diagonal state space whose step, input and output
// depend on the input.
//   Δ_t  = softplus(delta_t + delta_bias)           (or delta_t + delta_bias)      [B, T, Dm]
//   S_t  = exp(Δ_t A) ⊙ S_{t−1} + Δ_t u_t ⊗ B_t     S_{−1} = initial_state or 0     [B, Dm, N]
//   y_t  = (S_t C_t + D ⊙ u_t) ⊙ silu(z_t)          z, D absent: no gate, no skip   [B, T, Dm]
// Channel d reads group ⌊d / (Dm/G)⌋ of B and C. softplus(x) = x where x > 20.
// [Gu & Dao 2023, eq. 2–4, Alg. 2]
//
// Work is cut into chunks of kChunk steps. The forward stores the state at the start of each chunk;
// the backward recomputes the states inside a chunk from it, so memory is O(T/kChunk · Dm · N).
// These are the kernels of the CPU; those of CUDA are in channel_scan. Derivation, bytes, times:
// README.md.
#include "ops/core/kernel.h"

namespace assay::ops {

struct SelectiveScanForward {
  DType dtype;  // dtype of u, delta, B, C, z, y. "real" below: f64 when dtype is f64, else f32
  // time ≥ 1; groups divides channels; 1 ≤ state_size ≤ 256
  int64_t batch;
  int64_t time;
  int64_t channels;
  int64_t groups;
  int64_t state_size;
  bool delta_softplus;
  // in  [B, T, Dm]
  View u;
  View delta;
  // in  [B, T, G, N]
  View B;
  View C;
  View z;                     // in  [B, T, Dm] or absent
  const void* A;              // in  [Dm, N] real, negative
  const void* D;              // in  [Dm] real or null
  const void* delta_bias;     // in  [Dm] real or null
  const void* initial_state;  // in  [B, Dm, N] real or null
  View y;                     // out [B, T, Dm]; every element is written
  void* final_state;          // out [B, Dm, N] real
  // out [B, num_chunks, Dm, N] real: the state before each chunk; null when no gradient is wanted
  void* chunk_states;
};

struct SelectiveScanBackward {
  // the inputs as they were; y and final_state are not read; chunk_states is
  SelectiveScanForward forward;
  View dy;                   // in  [B, T, Dm]
  const void* dfinal_state;  // in  [B, Dm, N] real or null
  // out [B, T, Dm]; dz absent without z
  View du;
  View ddelta;
  View dz;
  // out [B, T, G, N] real, contiguous
  void* dB;
  void* dC;
  // out [Dm, N], [Dm], [Dm] real, summed over batch and time; the last two may be null
  void* dA;
  void* dD;
  void* ddelta_bias;
  void* dinitial_state;  // out [B, Dm, N] real or null
};

// CPU: Highway, run-time dispatch, fp32 and fp64 (bf16 is read and written, computed in fp32). One
// writer a row.
namespace cpu {
constexpr int64_t kChunk = 64;
size_t workspace_bytes(const SelectiveScanForward&);
size_t workspace_bytes(const SelectiveScanBackward&);
void selective_scan(const SelectiveScanForward&, void* workspace, const ParallelFor&);
void selective_scan(const SelectiveScanBackward&, void* workspace, const ParallelFor&);
}  // namespace cpu

}  // namespace assay::ops
