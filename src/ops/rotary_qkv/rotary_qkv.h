#pragma once
// Queries, keys and values with rotary positions out of one projection, differentiable. Formula:
// kernel.h in this folder.
#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

namespace assay::ops {

// qkv [B, T, H + 2 Hk, D] (fp32, fp64, bf16; D even), cos and sin [T, D/2] (fp32, fp64 for fp64) →
// q [B, T, H, D], k [B, T, Hk, D], v [B, T, Hk, D]; q and k are turned, v is copied. With scale [H]
// (QK-norm) q and k have unit length, and q is multiplied by its head's scale.
std::array<at::Tensor, 3> rotary_qkv(const at::Tensor& qkv, int64_t kv_heads, const at::Tensor& cos,
                                     const at::Tensor& sin,
                                     const std::optional<at::Tensor>& scale = {});
// qk [B, T, H + Hk, D] → q [B, T, H, D] and k [B, T, Hk, D], turned.
std::array<at::Tensor, 2> rotary_qk(const at::Tensor& qk, int64_t kv_heads, const at::Tensor& cos,
                                    const at::Tensor& sin);
// With v undefined if qkv has no values.
std::array<at::Tensor, 3> rotary_qkv_reference(const at::Tensor& qkv, int64_t kv_heads,
                                               const at::Tensor& cos, const at::Tensor& sin,
                                               const std::optional<at::Tensor>& scale = {},
                                               bool with_values = true);

}  // namespace assay::ops
