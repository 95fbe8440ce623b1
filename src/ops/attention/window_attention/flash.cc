#include "ops/attention/window_attention/flash.h"

#include <torch/torch.h>

#include "ops/core/dispatch.h"

namespace assay::ops {
namespace {

constexpr int64_t kColumns = 8;  // of slopes; kernels want a multiple of eight

// x [B, T, H, D] with `columns` [..., C], which may leave out sizes of x, and zeros up to kColumns.
// at::cat and at::constant_pad_nd take several times as long.
at::Tensor with_columns(const at::Tensor& x, const at::Tensor& columns = {}) {
  const int64_t head_dim = x.size(3);
  const at::Tensor all =
      at::empty({x.size(0), x.size(1), x.size(2), head_dim + kColumns}, x.options());
  all.narrow(3, 0, head_dim).copy_(x);
  const int64_t given = columns.defined() ? columns.size(-1) : 0;
  if (given > 0) all.narrow(3, head_dim, given).copy_(columns);
  all.narrow(3, head_dim + given, kColumns - given).zero_();
  return all;
}

// −slope · p of the query at position p, which append_slopes() leaves out: [H, T]
at::Tensor bias_of_queries(const WindowInputs& in) {
  const int64_t end = in.k.size(1);
  const at::Tensor p = at::arange(end - in.q.size(1), end, in.slopes.options());
  return -in.slopes.unsqueeze(1) * p;
}

// The positions that a query sees before and after its own, absent where the causal mask decides.
struct Window {
  std::optional<c10::SymInt> before;
  std::optional<c10::SymInt> after;
};
Window window_of(const WindowInputs& in) {
  if (in.window >= in.k.size(1)) return {};
  return {in.window - 1, 0};
}

std::tuple<at::Tensor, at::Tensor> flash(const WindowInputs& in) {
  const Window window = window_of(in);
  const auto softmax = at::_flash_attention_forward_symint(
      in.q, in.k, in.v, {}, {}, in.q.size(1), in.k.size(1), 0.0, /*is_causal=*/true,
      /*return_debug_mask=*/false, in.scale, window.before, window.after);
  return {std::get<0>(softmax), std::get<1>(softmax)};
}

}  // namespace

WindowInputs append_slopes(const WindowInputs& in) {
  const at::Tensor factor = in.slopes.detach() / in.scale;
  const at::Tensor high = factor.to(in.q.scalar_type());
  const at::Tensor low = (factor - high).to(in.q.scalar_type());
  const at::Tensor of_q = at::stack({high, low, high, low, high, low}, -1);  // [H, 6]
  const at::Tensor j = at::arange(in.k.size(1), in.k.options().dtype(at::kLong)).unsqueeze(1);
  const at::Tensor ones = j.bitwise_and(0xff);
  const at::Tensor middle = j.bitwise_and(0xff00);
  const at::Tensor rest = j - ones - middle;
  const at::Tensor of_k = at::stack({ones, ones, middle, middle, rest, rest}, -1);  // [S, 1, 6]
  return {with_columns(in.q, of_q),
          with_columns(in.k, of_k),
          with_columns(in.v),
          {},
          in.decay_sums,
          in.window,
          in.scale};
}

bool flash_serves(const WindowInputs& in) {
  // A build without CUDA kernels does not ask what a GPU is capable of.
  const bool gpu = kCudaKernels ? on_gpu(in.q.device()) : in.q.is_cuda();
  const bool alibi = in.slopes.defined();
  return gpu && in.q.scalar_type() == at::kBFloat16 && !in.decay_sums.defined() &&
         in.q.size(3) % 8 == 0 && in.q.size(3) + (alibi ? kColumns : 0) <= 256 &&
         !(alibi && in.scale == 0);
}

at::Tensor window_attention_fused(const WindowInputs& in) {
  if (in.window < in.k.size(1) || in.q.size(1) != in.k.size(1)) return std::get<0>(flash(in));
  return at::scaled_dot_product_attention(in.q.transpose(1, 2), in.k.transpose(1, 2),
                                          in.v.transpose(1, 2), {}, 0.0,
                                          /*is_causal=*/in.q.size(1) > 1, in.scale,
                                          /*enable_gqa=*/in.q.size(2) != in.k.size(2))
      .transpose(1, 2);
}

std::tuple<at::Tensor, at::Tensor> window_attention_flash(const WindowInputs& in) {
  if (!in.slopes.defined()) return flash(in);
  const auto [out, logsumexp] = flash(append_slopes(in));
  return {out.narrow(3, 0, in.q.size(3)).contiguous(), logsumexp.add_(bias_of_queries(in))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> window_attention_flash_backward(
    const WindowInputs& in, const at::Tensor& out, const at::Tensor& logsumexp,
    const at::Tensor& dout) {
  if (in.slopes.defined()) {
    const auto own = [&](const at::Tensor& x) { return x.narrow(3, 0, in.q.size(3)); };
    const auto [dq, dk, dv] = window_attention_flash_backward(
        append_slopes(in), with_columns(out), logsumexp - bias_of_queries(in), with_columns(dout));
    return {own(dq), own(dk), own(dv)};
  }
  const Window window = window_of(in);
  const at::Tensor no_dropout = at::empty({2}, in.q.options().dtype(at::kUInt64));
  return at::_flash_attention_backward_symint(
      dout, in.q, in.k, in.v, out, logsumexp.contiguous(), {}, {}, in.q.size(1), in.k.size(1), 0.0,
      /*is_causal=*/true, no_dropout, no_dropout, in.scale, window.before, window.after);
}

}  // namespace assay::ops
