#pragma once
// The choice of Top-1 attention alone, in bfloat16, by instructions that GPUs have from compute
// capability 8.0: where the passes of this folder do not run, torch's FlashAttention-2 computes the
// softmax, but it does not tell which key weighs most.
#include "ops/core/kernel.h"

namespace assay::ops {

struct Top1Choice {
  // B, T, and the positions before the first query: there are past + T keys
  int64_t batch;
  int64_t time;
  int64_t past;
  // H, Hk, D; Hk divides H
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  // 0: the position j ≤ past + t with the largest s q_t·k_j, the lowest of equal ones. C: of the
  // chunks of C keys before the query's own, that with the largest log Σ exp(s q_t·k_j), the lowest
  // of equal ones; −1 where there is none. A NaN counts as the largest.
  int64_t chunk_size;
  double scale;  // s
  // in  [B, T, H, D], [B, past + T, Hk, D]
  View q;
  View k;
  int64_t* index;  // out [B, H, T]
  // For positions: the values in, [B, past + T, Hk, D], and the chosen ones out, [B, T, H, D], NaN
  // where a score is NaN.
  View v = {};
  View out = {};
};

namespace cuda {
// Null: choose() takes it. Else the reason, and it throws Unsupported.
const char* why_unsupported(const Top1Choice&);
void choose(const Top1Choice&, Stream);
}  // namespace cuda

}  // namespace assay::ops
