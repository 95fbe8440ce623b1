#pragma once
// The element-wise parts of Mamba-3's mixer around its recurrence, differentiable. Formulas:
// kernel.h in this folder.
#include <ATen/core/Tensor.h>

#include <optional>

namespace assay::ops {

// All throw ValueError naming the argument when a shape, dtype or device does not fit. The
// references are plain tensor arithmetic and define the results.

// b and c are [B, T, G, N] (fp32, fp64, bf16), where G divides the H heads; biases are [H, N].
// Steps Δ are [B, T, H] and turns [B, T, P] with 2 P ≤ N: at step t, pair i of the channels of head
// h turns by another Δ[t, h] turns[t, i]. `angle` [B, H, P] is that before the first step, 0 if
// absent.
struct Mamba3Rotated {
  // b and c [B, T, H, N] in the dtype of b
  at::Tensor b;
  at::Tensor c;
  // Σ b c [B, T, H] and the angle after the last step, in [0, 2π): fp32 (fp64 for fp64)
  at::Tensor dot;
  at::Tensor angle;
};
Mamba3Rotated mamba3_rotate(const at::Tensor& b, const at::Tensor& c, const at::Tensor& b_bias,
                            const at::Tensor& c_bias, const at::Tensor& steps,
                            const at::Tensor& turns, const std::optional<at::Tensor>& angle = {});
Mamba3Rotated mamba3_rotate_reference(const at::Tensor& b, const at::Tensor& c,
                                      const at::Tensor& b_bias, const at::Tensor& c_bias,
                                      const at::Tensor& steps, const at::Tensor& turns,
                                      const std::optional<at::Tensor>& angle = {});
// x [..., D] times one factor [..., heads] (fp32; fp64 for fp64) per head of D / heads channels,
// and x itself for other uses: its gradient is added in the same kernel.
struct Mamba3Written {
  at::Tensor written;
  at::Tensor x;
};
Mamba3Written mamba3_write(const at::Tensor& x, const at::Tensor& factor);
Mamba3Written mamba3_write_reference(const at::Tensor& x, const at::Tensor& factor);
// (y + skip x) ⊙ silu(z) of sequences [..., D], with one skip [..., heads] per head.
at::Tensor mamba3_output(const at::Tensor& y, const at::Tensor& x, const at::Tensor& z,
                         const at::Tensor& skip);
at::Tensor mamba3_output_reference(const at::Tensor& y, const at::Tensor& x, const at::Tensor& z,
                                   const at::Tensor& skip);

}  // namespace assay::ops
