#pragma once
// A token mixed with the one before it, differentiable. Formula: kernel.h in this folder.
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace assay::ops {

// x [B, T, D] (fp32, fp64, bf16), before [B, D]: what stood at position −1, 0 when absent; mix [n,
// D], n from 1 to 6; own: none, or n tensors [B, T, D] that are added to it → y_1 … y_n [B, T, D]
// in the dtype of x. ValueError naming the argument when a shape does not fit. Gradients for all.
std::vector<at::Tensor> token_shift(const at::Tensor& x, const std::optional<at::Tensor>& before,
                                    const at::Tensor& mix, const std::vector<at::Tensor>& own = {});
std::vector<at::Tensor> token_shift_reference(const at::Tensor& x,
                                              const std::optional<at::Tensor>& before,
                                              const at::Tensor& mix,
                                              const std::vector<at::Tensor>& own = {});

}  // namespace assay::ops
