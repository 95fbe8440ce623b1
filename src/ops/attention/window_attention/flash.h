#pragma once
// Window attention by torch's kernels, on GPUs and for sizes that the kernels of this folder do not
// take. FlashAttention-2 has no bias in its backward pass, so ALiBi is columns of q and k there
// (README.md).
#include <ATen/core/Tensor.h>

#include <tuple>

namespace assay::ops {

// q [B, T, H, D]; k, v [B, S, Hkv, D]; slopes [H] and decay_sums [B, S, H] undefined when absent;
// window ≥ 1.
struct WindowInputs {
  at::Tensor q;
  at::Tensor k;
  at::Tensor v;
  at::Tensor slopes;
  at::Tensor decay_sums;
  int64_t window;
  double scale;
};

// q [B, T, H, D + 8] and k, v [B, S, Hkv, D + 8] without slopes, in the dtypes of q, k and v. Their
// attention has that with slopes in its first D columns. Columns of q hold slope / scale as the sum
// of two numbers of q's dtype. Columns of k hold j as the sum of three numbers of at most 8 bits
// each. So in bf16 the slope has 16 bits, and j is exact up to 2^24.
WindowInputs append_slopes(const WindowInputs& in);

// Whether FlashAttention-2 takes the call. It gives slopes no gradient.
bool flash_serves(const WindowInputs& in);

// out [B, T, H, D] without slopes, differentiable: causal without a window through
// scaled_dot_product_attention, which picks the fastest kernel; else by FlashAttention-2, which
// knows windows and queries at the end of the keys.
at::Tensor window_attention_fused(const WindowInputs& in);

// FlashAttention-2: out [B, T, H, D] and logsumexp [B, H, T] float32, as in kernel.h
std::tuple<at::Tensor, at::Tensor> window_attention_flash(const WindowInputs& in);

// The gradients of q, k and v.
std::tuple<at::Tensor, at::Tensor, at::Tensor> window_attention_flash_backward(
    const WindowInputs& in, const at::Tensor& out, const at::Tensor& logsumexp,
    const at::Tensor& dout);

}  // namespace assay::ops
