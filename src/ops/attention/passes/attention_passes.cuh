#pragma once
// Softmax attention over a causal window in passes that stream one operand past blocks which own
// rows of the other, for sm_90a. The formulas are in window_attention/kernel.h. Every call
// enqueues on `stream`, allocates nothing and gives the same bits every time.
#include "ops/cuda/launch.cuh"

namespace assay::ops::cuda {

struct Attention {
  // B, T, S; 1 ≤ T ≤ S: the queries are the last T positions
  int64_t batch;
  int64_t time;
  int64_t keys;
  // H, Hkv, D; Hkv divides H
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t window;  // ≥ 1; S or more: all positions
  double scale;
  // bf16 [B, T, H, D]; [B, S, Hkv, D]
  View q;
  View k;
  View v;
  const float* slopes = nullptr;      // ALiBi, [H]
  const float* decay_sums = nullptr;  // [B, S, H]; without slopes
};

struct AttentionOutputs {
  View out;                    // bf16 [B, T, H, D]
  float* logsumexp = nullptr;  // [B, H, T], natural logarithm; may be null
  // Top-1: the position of the largest score, the lowest of equal ones, [B, H, T]. Then `out` has
  // the value there, and the weighted mean of values is `soft` [B, H, T, D], null if not wanted.
  int64_t* index = nullptr;
  float* soft = nullptr;
};

struct AttentionGradients {
  View dout;               // bf16 [B, T, H, D]
  const float* logsumexp;  // as the forward pass wrote it
  View out;                // bf16, or
  const float* soft;       // the weighted mean of values, if not null
  // bf16; without dv it is not computed
  View dq;
  View dk;
  View dv;
  float* ddecay_sums = nullptr;  // [B, S, H]
};

// Scratch memory of a call.
struct AttentionWorkspace {
  bf16* q = nullptr;           // q times the sign of the scale, unless that is 1
  int64_t rows = 0;            // rows per head below: T, padded to a multiple of 64
  float* logsumexp = nullptr;  // [B, H, rows] in base 2, +inf past the last query: it adds nothing
  float* delta = nullptr;      // Σ_d dout · out
  // [B, H, key_rows]: decay_sums in base 2; key_rows is S, padded to a multiple of 64
  float* decay_sums = nullptr;
  int64_t key_rows = 0;
  AttentionWorkspace(const Attention& a, bool backward, WorkspaceArena& arena);
};

// Null, or why these passes do not take it.
const char* why_unsupported(const Attention& a);
void attention_forward(const Attention& a, const AttentionOutputs& to, const AttentionWorkspace& m,
                       Stream stream);
void attention_backward(const Attention& a, const AttentionGradients& g,
                        const AttentionWorkspace& m, Stream stream);

}  // namespace assay::ops::cuda
