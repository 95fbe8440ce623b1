#pragma once
// One decode step of softmax attention for sequences at positions of their own, on CUDA.
// Definition: kernel.h next to this file.
#include <ATen/core/Tensor.h>

#include <optional>
#include <span>

namespace assay::ops {

// Keys and values that one sequence has read, [1, S, Hkv, D] each, contiguous in one sequence and
// beginning at multiples of 16 bytes. The last step is that of the new token. Undefined: the row is
// not used.
struct CacheOfRow {
  at::Tensor k, v;
};

// q [B, H, D]; k, v [B, Hkv, D] of the new tokens, which are written into the last steps of
// `caches` (one per row); alibi_slopes [H] f32 or absent → [B, H, D] in the dtype of q. It has no
// gradient. ValueError when shapes or dtypes do not fit.
at::Tensor decode_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            std::span<const CacheOfRow> caches, double scale,
                            const std::optional<at::Tensor>& alibi_slopes = {});

// The same for rows of one length: `keys`, `values` [B, S, Hkv, D], each row as in CacheOfRow.
at::Tensor decode_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& keys, const at::Tensor& values, double scale,
                            const std::optional<at::Tensor>& alibi_slopes = {});

// Whether it serves such queries: float32 or bfloat16 on CUDA, D a multiple of 8 up to 256, and no
// gradient is wanted.
bool decode_attention_serves(const at::Tensor& q);

}  // namespace assay::ops
