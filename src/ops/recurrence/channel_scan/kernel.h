#pragma once
// The scans of Mamba-1, with A of the channel or of the token, and of Longhorn, before and after
// its diagonal approximation. Channels share k and q; each has a step p and a state S [N] of its
// own.
//   S_t = keep_t ⊙ S_{t−1} + (p_t ⊙ x_t) ⊗ k_t
//   Update::decay     p_t = softplus(raw_t) or raw_t        keep_t = exp(p_t rate), rate [N] of the
//                                                           channel or of the token
//   Update::diagonal  p_t = β_t / (1 + β_t k_tᵀk_t)         keep_t = 1 − p_t ⊗ k_t²
//   Update::exact    the same p_t; β_t = sigmoid(raw_t)   S_{t−1} k_t is taken from x_t, keep_t = 1
//   raw_t = delta_t + delta_bias                           S_{−1} = initial_state or 0
//   y_t = (S_t q_t + D ⊙ x_t) ⊙ silu(z_t)                  z, D absent: no gate, no skip
// [Gu & Dao 2023, Alg. 2; Liu et al. 2024, Alg. 1 and §5]
//
// The forward stores the state at the start of each chunk of chunk_size() steps; the backward
// recomputes from it. Derivation, bytes, times: README.md. Callers: longhorn.h and
// selective_scan.h, through channel_scan.h.
#include "ops/core/kernel.h"

namespace assay::ops {

enum class Update { decay, diagonal, exact };
constexpr int64_t kMaxTokenStates = 64;

struct TypedView : View {
  DType dtype = DType::f32;  // f32 or bf16
};

// A few steps, as decoding takes them, each sequence and parameter in a dtype of its own; no
// gradient. Here a head of channels may share delta and one decay (SSD), and groups of channels
// k and q.
constexpr int64_t kMaxTokenDecodeSteps = 8;
constexpr int64_t kMaxDecodeStates = 128;
struct TokenSteps {
  Update update;
  // time ≥ 1; 1 ≤ state_size ≤ kMaxDecodeStates
  int64_t batch;
  int64_t time;
  int64_t channels;
  int64_t state_size;
  // channels of a head; several groups: of multiples of 32 channels
  int64_t head_dim = 1;
  int64_t groups = 1;
  bool delta_softplus;  // Update::decay
  // in  [B, T, Dm]; z may be absent
  TypedView x;
  TypedView z;
  TypedView delta;  // in  [B, T, Dm / head_dim]
  // in  [B, T, groups, N]
  TypedView k;
  TypedView q;
  // in  [B, T, N], [Dm, N] or [Dm / head_dim]; absent unless Update::decay
  TypedView rate;
  int64_t rate_channel_stride = 0;  //     N of [Dm, N]
  bool rate_of_heads = false;       //     [Dm / head_dim]: one for all N
  // in  [Dm / head_dim] or absent; strides of 0, as those of `rate`
  TypedView D;
  TypedView delta_bias;
  const float* initial_state;  // in  [B, Dm, N] or null
  TypedView y;                 // out [B, T, Dm]
  float* final_state;          // out [B, Dm, N]
};

struct ChannelScanForward {
  DType dtype;  // f32 or bf16: of x, delta, k, q, z, y
  Update update;
  // time ≥ 1; 1 ≤ state_size ≤ kMaxTokenStates
  int64_t batch;
  int64_t time;
  int64_t channels;
  int64_t state_size;
  bool delta_softplus;  // Update::decay
  // in  [B, T, Dm]
  View x;
  View delta;
  // in  [B, T, groups, N]
  View k;
  View q;
  // in  [B, T, N] or contiguous [Dm, N] float, ≤ 0; absent unless Update::decay
  View rate;
  bool rate_of_channels = false;  // [Dm, N]
  // Channel d reads group ⌊d / (Dm / groups)⌋; 1 unless rate_of_channels.
  int64_t groups = 1;
  View z;                      // in  [B, T, Dm] or absent
  const float* D;              // in  [Dm] or null
  const float* delta_bias;     // in  [Dm] or null
  const float* initial_state;  // in  [B, Dm, N] or null
  View y;                      // out [B, T, Dm]; every element is written
  float* final_state;          // out [B, Dm, N]
  // out chunk_states() numbers; null when no gradient is wanted
  float* chunk_states;
};

struct ChannelScanBackward {
  // the inputs as they were; y and final_state are not read; chunk_states is
  ChannelScanForward forward;
  View dy;                    // in  [B, T, Dm]
  const float* dfinal_state;  // in  [B, Dm, N] or null
  // out [B, T, Dm]; dz absent without z
  View dx;
  View ddelta;
  View dz;
  // out as k, q and rate, contiguous; drate null unless Update::decay
  float* dk;
  float* dq;
  float* drate;
  // out [Dm], summed over batch and time; may be null
  float* dD;
  float* ddelta_bias;
  float* dinitial_state;  // out [B, Dm, N] or null
};

// CUDA, sm_90a: enqueues on `stream` and returns, allocates nothing, gives the same bits every
// time (no atomics). `workspace` and chunk_states are 256-byte aligned. Throws Error with CUDA's
// reason when a launch fails, Unsupported, before any launch, for float64 or a larger state.
namespace cuda {
int64_t chunk_size(const ChannelScanForward&);  // steps between two stored states, a multiple of 16
int64_t chunk_states(const ChannelScanForward&);  // numbers that `chunk_states` holds
size_t workspace_bytes(const ChannelScanForward&);
size_t workspace_bytes(const ChannelScanBackward&);
void channel_scan(const ChannelScanForward&, void* workspace, Stream);
void decode(const TokenSteps&, Stream);  // one after another
void channel_scan(const ChannelScanBackward&, void* workspace, Stream);
}  // namespace cuda

}  // namespace assay::ops
