#pragma once
// One decode step of softmax attention for sequences at positions of their own.
//   S_b             tokens that row b has then read, the new one included; 0: the row is not used
//   k_j, v_j        of token j, in the caches of row b; those of token S_b − 1 are written there
//   score_{b,h,j} = scale · q_{b,h}·k_j − slope_h · (S_b − 1 − j)      without slopes: slope_h = 0
//   out_{b,h}     = Σ_{j < S_b} softmax_j(score_{b,h,j}) v_j           0 for a row that is not used
// Head h reads head ⌊h Hkv/H⌋ of the caches.      [Vaswani 2017, eq. 1; keys in parts: Dao 2023]
#include "ops/kernel.h"

namespace assay::ops {

// The caches of one sequence.
struct DecodeCache {
  void *k = nullptr, *v = nullptr;  // in, out [length, Hkv, D], contiguous, aligned to 16 bytes
  int64_t length = 0;
};

struct DecodeAttention {
  DType dtype;                              // of q, k, v, the caches and out: f32 or bf16
  int64_t rows, heads, kv_heads, head_dim;  // B, H, Hkv, D; D: a multiple of 8 up to 256
  double scale;
  const void *q, *k, *v;                 // in  [B, H, D], [B, Hkv, D] twice; aligned to 16 bytes
  int64_t q_stride, k_stride, v_stride;  // of their rows, in elements; the rest is contiguous
  const float* alibi_slopes;             // in  [H] or null
  const DecodeCache* caches;             // in  [B], in the memory of the host
  void* out;                             // out [B, H, D], contiguous
};

// The bits of a row do not depend on the other rows.
namespace cuda {
size_t workspace_bytes(const DecodeAttention& args);
void decode_attention(const DecodeAttention& args, void* workspace, Stream stream);
}  // namespace cuda

}  // namespace assay::ops
