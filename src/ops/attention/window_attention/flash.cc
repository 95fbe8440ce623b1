#include "ops/attention/window_attention/flash.h"

#include <torch/torch.h>

#include "ops/core/dispatch.h"

namespace assay::ops {
namespace {

// x [B, T, H, D] with `columns` [..., C], which may leave out sizes of x, and zeros up to a
// multiple of eight. at::cat and at::constant_pad_nd take several times as long.
at::Tensor with_columns(const at::Tensor& x, const at::Tensor& columns) {
  const int64_t head_dim = x.size(3);
  const int64_t given = columns.size(-1);
  const int64_t zeros = (8 - given % 8) % 8;
  const at::Tensor all =
      at::empty({x.size(0), x.size(1), x.size(2), head_dim + given + zeros}, x.options());
  all.narrow(3, 0, head_dim).copy_(x);
  all.narrow(3, head_dim, given).copy_(columns);
  all.narrow(3, head_dim + given, zeros).zero_();
  return all;
}
at::Tensor with_zeros(const at::Tensor& x, int64_t count) {
  return with_columns(x, at::zeros({count}, x.options()));
}

struct Columns {
  at::Tensor of_q;  // [H, C]
  at::Tensor of_k;  // [S, 1, C] or [B, S, Hkv, C]
};
Columns columns_of_slopes(const WindowInputs& in) {
  const at::Tensor factor = in.slopes.detach() / in.scale;
  const at::Tensor high = factor.to(in.q.scalar_type());
  const at::Tensor low = (factor - high).to(in.q.scalar_type());
  const at::Tensor j = at::arange(in.k.size(1), in.k.options().dtype(at::kLong)).unsqueeze(1);
  const at::Tensor ones = j.bitwise_and(0xff);
  const at::Tensor middle = j.bitwise_and(0xff00);
  const at::Tensor rest = j - ones - middle;
  return {at::stack({high, low, high, low, high, low}, -1),
          at::stack({ones, ones, middle, middle, rest, rest}, -1)};
}
// First the first parts of all heads that share the key, then the second and the third. Queries
// have ones at the parts of their own head.
Columns columns_of_decays(const WindowInputs& in) {
  const int64_t kv_heads = in.k.size(2);
  at::Tensor rest = in.decay_sums.detach().unflatten(2, {kv_heads, -1}) / -in.scale;
  std::vector<at::Tensor> parts;
  for (int i = 0; i < 3; ++i) {
    parts.push_back(rest.to(in.k.scalar_type()));
    rest = rest - parts.back();
  }
  return {at::eye(in.q.size(2) / kv_heads, in.q.options()).repeat({kv_heads, 3}),
          at::cat(parts, -1)};
}

// The terms of a query's scores that append_biases() leaves out, c and −slope · p: [B or 1, H, T]
at::Tensor bias_of_queries(const WindowInputs& in) {
  const int64_t end = in.k.size(1);
  const int64_t first = end - in.q.size(1);
  if (in.decay_sums.defined()) return in.decay_sums.slice(1, first).transpose(1, 2);
  return in.slopes.view({1, -1, 1}) * -at::arange(first, end, in.slopes.options());
}
bool is_biased(const WindowInputs& in) { return in.slopes.defined() || in.decay_sums.defined(); }

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

WindowInputs append_biases(const WindowInputs& in) {
  const auto [of_q, of_k] = in.slopes.defined() ? columns_of_slopes(in) : columns_of_decays(in);
  return {with_columns(in.q, of_q),
          with_columns(in.k, of_k),
          with_zeros(in.v, of_q.size(-1)),
          {},
          {},
          in.window,
          in.scale};
}

bool flash_serves(const WindowInputs& in) {
  // A build without CUDA kernels does not ask what a GPU is capable of.
  const bool gpu = kCudaKernels ? on_gpu(in.q.device()) : in.q.is_cuda();
  const int64_t columns = in.slopes.defined()       ? 6
                          : in.decay_sums.defined() ? 3 * (in.q.size(2) / in.k.size(2))
                                                    : 0;
  return gpu && in.q.scalar_type() == at::kBFloat16 && in.q.size(3) % 8 == 0 &&
         in.q.size(3) + (columns + 7) / 8 * 8 <= 256 && !(is_biased(in) && in.scale == 0) &&
         !(in.slopes.defined() && in.decay_sums.defined());
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
  if (!is_biased(in)) return flash(in);
  const auto [out, logsumexp] = flash(append_biases(in));
  return {out.narrow(3, 0, in.q.size(3)).contiguous(), logsumexp.add_(bias_of_queries(in))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> window_attention_flash_backward(
    const WindowInputs& in, const at::Tensor& out, const at::Tensor& logsumexp,
    const at::Tensor& dout) {
  if (is_biased(in)) {
    const WindowInputs all = append_biases(in);
    const int64_t head_dim = in.q.size(3);
    const int64_t columns = all.q.size(3) - head_dim;
    const auto own = [&](const at::Tensor& x) { return x.narrow(3, 0, head_dim); };
    const auto [dq, dk, dv] = window_attention_flash_backward(
        all, with_zeros(out, columns), logsumexp - bias_of_queries(in), with_zeros(dout, columns));
    return {own(dq), own(dk), own(dv)};
  }
  const Window window = window_of(in);
  const at::Tensor no_dropout = at::empty({2}, in.q.options().dtype(at::kUInt64));
  return at::_flash_attention_backward_symint(
      dout, in.q, in.k, in.v, out, logsumexp.contiguous(), {}, {}, in.q.size(1), in.k.size(1), 0.0,
      /*is_causal=*/true, no_dropout, no_dropout, in.scale, window.before, window.after);
}

}  // namespace assay::ops
