#pragma once
// Queries, keys and values with rotary positions out of one projection, differentiable. Formula:
// kernel.h in this folder.
#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

namespace assay::ops {

// projected [B, T, (H + 2 Hk) D] (fp32, fp64, bf16; D even), cos and sin [T, D/2] (fp32, fp64 for
// fp64) → q [B, T, H, D], k [B, T, Hk, D], v [B, T, Hk, D]; q and k are turned. With scale [H]
// (QK-norm) q and k have unit length, and q is multiplied by its head's scale. v is a view of
// `projected`. Without scale q and k are too: they are turned in place, so nobody else may read
// `projected`, or have kept it for a gradient.
std::array<at::Tensor, 3> rotary_qkv_(const at::Tensor& projected, int64_t heads, int64_t kv_heads,
                                      const at::Tensor& cos, const at::Tensor& sin,
                                      const std::optional<at::Tensor>& scale = {});
// qk [B, T, H + Hk, D] → q and k in memory of their own.
std::array<at::Tensor, 2> rotary_qk(const at::Tensor& qk, int64_t kv_heads, const at::Tensor& cos,
                                    const at::Tensor& sin,
                                    const std::optional<at::Tensor>& scale = {});
std::array<at::Tensor, 2> rotary_qk_reference(const at::Tensor& qk, int64_t kv_heads,
                                              const at::Tensor& cos, const at::Tensor& sin,
                                              const std::optional<at::Tensor>& scale = {});

}  // namespace assay::ops
