#pragma once
// One decode step of softmax attention for sequences at positions of their own, on CUDA.
// Definition: kernel.h next to this file.
#include <ATen/core/Tensor.h>

#include <optional>

namespace assay::ops {

// Transformations of the queries and keys of the new tokens and of the scores; off by default.
struct DecodeOptions {
  double scale = 1;  // factor of the scores
  // cos and sin of rotary positions, [positions, D/2] f32 each. D must be a multiple of 16.
  std::optional<at::Tensor> cos;
  std::optional<at::Tensor> sin;
  std::optional<at::Tensor> norm_scale;    // [H] f32: QK-norm
  std::optional<at::Tensor> alibi_slopes;  // [H] f32
  int64_t window = 0;  // for rows at positions of their own: tokens that a query sees; 0: all
};

// q [B, H, D]; k, v [B, Hkv, D] of the new tokens, which are written into the caches; positions [B]
// i64 of the new tokens, −1 for a row that is not used; caches [B, 2] i64: the addresses of the
// keys and of the values of each row, [> position, Hkv, D] in the dtype of q, contiguous and
// beginning at multiples of 16 bytes → [B, H, D] in the dtype of q. With a window the caches are
// [ring_size(window), Hkv, D], and token j is at j mod ring_size(window). Positions and addresses
// are read by the kernel, and are not checked. It has no gradient. ValueError when shapes or dtypes
// do not fit.
at::Tensor decode_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& positions, const at::Tensor& caches,
                            const DecodeOptions& options);

// As above, for rows of one length: keys, values [B, S, Hkv, D], each row contiguous and beginning
// at a multiple of 16 bytes. Their last step is that of the new token, which is at `position`.
at::Tensor decode_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& keys, const at::Tensor& values, int64_t position,
                            const DecodeOptions& options);

int64_t ring_size(int64_t window);  // the least power of two that is `window` or more

// Whether it serves queries of this dtype and D on the device, where no gradient is wanted: float32
// or bfloat16 on CUDA, D a multiple of 8 up to 256.
bool decode_attention_serves(const at::TensorOptions& options, int64_t head_dim);

}  // namespace assay::ops
