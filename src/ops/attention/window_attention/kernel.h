#pragma once
// Causal softmax attention over a window.      [Vaswani 2017, eq. 1; Child 2019; Press 2022: ALiBi;
//                                               Lin 2025, eq. 4: decays]
//   p           = t + S − T          position of query t: the queries are the last T of S positions
//   score_{t,j} = scale · q_t·k_j − slope_h · (p − j) + c_{p,h} − c_{j,h}
//                 without slopes: slope_h = 0; without decays: c = 0
//   N(t)        = {j : p − window < j ≤ p}
//   logsumexp_t = log Σ_{j ∈ N(t)} exp(score_{t,j})
//   out_t       = Σ_{j ∈ N(t)} exp(score_{t,j} − logsumexp_t) v_j
// Head h of q reads head ⌊h Hkv/H⌋ of k and v. The backward computes the scores again from
// logsumexp, so nothing of size T·window is ever stored [Dao 2022, Alg. 1, 4]. Derivation
// and times: README.md.
#include "ops/core/kernel.h"

namespace assay::ops {

struct WindowAttentionForward {
  DType dtype;  // dtype of q, k, v, out. "real": f64 when dtype is f64, else f32
  // B, T, S; 1 ≤ T ≤ S
  int64_t batch;
  int64_t time;
  int64_t keys;
  // H, Hkv, D; Hkv divides H
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t window;  // ≥ 1; S or more: all positions
  double scale;
  View q;  // in  [B, T, H, D]
  // in  [B, S, Hkv, D]
  View k;
  View v;
  const void* alibi_slopes;  // in  [H] real or null
  const void* decay_sums;    // in  [B, S, H] real or null: c, sums of log decays along time
  View out;                  // out [B, T, H, D]
  // out [B, H, T] real, natural logarithm; null when no gradient is wanted
  void* logsumexp;
};

struct WindowAttentionBackward {
  WindowAttentionForward forward;  // as it was; out and logsumexp are read
  View dout;                       // in  [B, T, H, D]
  View dq;                         // out [B, T, H, D]
  // out [B, S, Hkv, D]; on CPUs real and contiguous
  View dk;
  View dv;
  void* dalibi_slopes;  // out [H] real or null
  void* ddecay_sums;    // out [B, S, H] real; null without decay_sums
};

// Highway, run-time dispatch, fp32 and fp64 (bf16 is read and written, and sums are fp32). Heads
// and blocks of queries go side by side forward, heads of k backward; one writer a row.
// `workspace` is 64-byte aligned.
namespace cpu {
size_t workspace_bytes(const WindowAttentionForward&);
size_t workspace_bytes(const WindowAttentionBackward&);
void window_attention(const WindowAttentionForward&, void* workspace, const ParallelFor&);
void window_attention(const WindowAttentionBackward&, void* workspace, const ParallelFor&);
}  // namespace cpu

// CUDA, sm_90: enqueues on `stream` and returns, allocates nothing, gives the same bits every
// time. `workspace` is 256-byte aligned.
namespace cuda {
// Null: the kernels take it on the current device, but for dalibi_slopes; slopes or decays, not
// both. Else the reason, and they throw Unsupported.
const char* why_unsupported(const WindowAttentionForward&);
size_t workspace_bytes(const WindowAttentionForward&);
size_t workspace_bytes(const WindowAttentionBackward&);
void window_attention(const WindowAttentionForward&, void* workspace, Stream);
void window_attention(const WindowAttentionBackward&, void* workspace, Stream);

// ddecay_sums alone, on GPUs from compute capability 8.0: where the kernels above do not run,
// torch's FlashAttention-2 computes the other gradients. delta [B, H, T]: dout · out. Reads neither
// out nor slopes.
const char* why_no_decay_gradients(const WindowAttentionForward&);
void decay_gradients(const WindowAttentionBackward&, const float* delta, Stream);
}  // namespace cuda

}  // namespace assay::ops
