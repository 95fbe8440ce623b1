#pragma once
// Window attention by torch's kernels, on GPUs and for sizes that the kernels of this folder do not
// take. FlashAttention-2 has no bias in its backward pass, so ALiBi and decays are columns of q and
// k there (README.md).
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

// q [B, T, H, D + C] and k, v [B, S, Hkv, D + C], in their dtypes, without the slopes or decays of
// `in`, which has one of them. Their attention has that of the inputs in its first D columns, and C
// is a multiple of 8.
//   slopes: q holds slope / scale as the sum of two numbers of its dtype, and k holds j as the sum
//   of three numbers of at most 8 bits each. In bf16 the slope has 16 bits, and j is exact up to
//   2^24.
//   decays: k holds −c / scale of each head that reads it as the sum of three numbers, 24 bits in
//   bf16.
WindowInputs append_biases(const WindowInputs& in);

// Whether FlashAttention-2 takes the call. It gives slopes and decays no gradient.
bool flash_serves(const WindowInputs& in);

// out [B, T, H, D] without slopes and decays, differentiable: causal without a window through
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
