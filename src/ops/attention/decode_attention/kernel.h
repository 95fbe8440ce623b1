#pragma once
// One decode step of softmax attention for sequences at positions of their own.
//   S_b             tokens that row b has then read, the new one included; 0: the row is not used
//   q_{b,h}, k_b    of the new token: rotated by its position, then divided by sqrt(Σ x² + 1e-6),
//                   and q multiplied by its head's scale (rotary_qkv); both are optional
//   k_j, v_j        of token j, in the caches of row b; those of token S_b − 1 are written there
//   score_{b,h,j} = scale · q_{b,h}·k_j − slope_h · (S_b − 1 − j)      without slopes: slope_h = 0
//   out_{b,h}     = Σ_{j < S_b} softmax_j(score_{b,h,j}) v_j           0 for a row that is not used
//   With a window W, j ≥ S_b − W only.
// Head h reads head ⌊h Hkv/H⌋ of the caches.      [Vaswani 2017, eq. 1; keys in parts: Dao 2023]
#include "ops/core/kernel.h"

namespace assay::ops {

// A cache of a row is [≥ S_b, Hkv, D], contiguous and aligned to 16 bytes; with a window
// [R, Hkv, D], R the least power of two that is W or more, and token j is at j mod R.
struct DecodeAttention {
  DType dtype;  // dtype of q, k, v, the caches and out: f32 or bf16
  // B, H, Hkv, D; D: a multiple of 8 up to 256
  int64_t rows;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  double scale;
  // in  [B, H, D], [B, Hkv, D] twice; aligned to 16 bytes
  const void* q;
  const void* k;
  const void* v;
  // strides from row to row, in elements; the rest is contiguous
  int64_t q_stride;
  int64_t k_stride;
  int64_t v_stride;
  // in  [positions, D/2], aligned to 16 bytes, or null: no rotation. D: a multiple of 16
  const float* cos;
  const float* sin;
  const float* norm_scale;    // in  [H], or null: no division by the length
  const float* alibi_slopes;  // in  [H] or null
  // Rows at positions of their own: the position of the new token, S_b − 1, or −1 for a row that is
  // not used; and the addresses of the caches of keys and of values.
  const int64_t* positions;      // in  [B] or null
  void* const (*row_caches)[2];  // in  [B, 2]
  int64_t window;                // W, or 0: none
  // Else: rows of one S and one position of the new token.
  // in, out: of row 0
  void* keys;
  void* values;
  // from row to row, in elements
  int64_t keys_stride;
  int64_t values_stride;
  int64_t length;
  int64_t position;
  void* out;  // out [B, H, D], contiguous
};

// The bits of a row do not depend on the other rows. `workspace` is 256-byte aligned.
namespace cuda {
size_t workspace_bytes(const DecodeAttention& args);
void decode_attention(const DecodeAttention& args, void* workspace, Stream stream);
}  // namespace cuda

}  // namespace assay::ops
