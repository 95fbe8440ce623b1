#include "nn/attention.h"

#include <torch/torch.h>

namespace assay::nn {
namespace {

using at::Tensor;

// q, k, v [B, H, ·, D]; mask: bool, true where attended; undefined with `causal`.
Tensor dense(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, bool causal, double scale) {
  return at::scaled_dot_product_attention(q, k, v, mask, /*dropout_p=*/0.0, causal, scale,
                                          /*enable_gqa=*/q.size(1) != k.size(1));
}

// [rows, columns], true where row i (position offset + i) sees column j.
Tensor band(int64_t rows, int64_t columns, int64_t offset, int64_t window, at::Device device) {
  const auto options = at::TensorOptions().dtype(at::kLong).device(device);
  const Tensor distance = at::arange(offset, offset + rows, options).unsqueeze(1) - at::arange(columns, options);
  const Tensor past = distance >= 0;
  return window < 0 ? past : past & (distance < window);
}

// Block i of `window` queries sees blocks i − 1 and i of the keys: T·2W scores instead of T·S.
Tensor windowed(Tensor q, Tensor k, Tensor v, int64_t window, double scale) {
  const int64_t time = q.size(2), size = k.size(2), blocks = (size + window - 1) / window;
  const auto padded = [&](const Tensor& x, int64_t front) {
    return at::constant_pad_nd(x, {0, 0, front, blocks * window - size}, 0);
  };
  const auto fold = [&](const Tensor& x) { return x.unflatten(2, {blocks, window}).transpose(1, 2); };  // [B, n, H, W, D]
  q = fold(padded(q, size - time));
  const auto with_previous = [&](const Tensor& x) {
    const Tensor now = fold(padded(x, 0));
    const Tensor before = at::cat({at::zeros_like(now.narrow(1, 0, 1)), now.narrow(1, 0, blocks - 1)}, 1);
    return at::cat({before, now}, 3).flatten(0, 1);  // [B·n, H, 2W, D]
  };
  Tensor mask = band(window, 2 * window, window, window, q.device()).unsqueeze(0).repeat({blocks, 1, 1});
  mask[0].narrow(1, 0, window).fill_(false);  // nothing stands before the first block
  mask = mask.repeat({q.size(0), 1, 1}).unsqueeze(1);
  const Tensor out = dense(q.flatten(0, 1), with_previous(k), with_previous(v), mask, false, scale);
  return out.unflatten(0, {q.size(0), blocks}).transpose(1, 2).flatten(2, 3).slice(2, size - time, size);
}

}  // namespace

Tensor causal_attention(const Tensor& q, const Tensor& k, const Tensor& v, int64_t window, double scale) {
  const int64_t time = q.size(1), size = k.size(1);
  if (window >= size) window = -1;
  const bool flash = q.is_cuda() && q.scalar_type() == at::kBFloat16 && q.size(3) % 8 == 0 && q.size(3) <= 256;
  if (flash && (window > 0 || size != time)) {  // FlashAttention-2 knows windows and queries at the end of the keys
    return std::get<0>(at::_flash_attention_forward(q, k, v, {}, {}, time, size, 0.0, /*is_causal=*/true, false, scale,
                                                    window > 0 ? std::optional<int64_t>(window - 1) : std::nullopt,
                                                    window > 0 ? std::optional<int64_t>(0) : std::nullopt));
  }
  const Tensor qh = q.transpose(1, 2), kh = k.transpose(1, 2), vh = v.transpose(1, 2);
  const auto heads_last = [](const Tensor& out) { return out.transpose(1, 2); };
  if (window < 0 && time == size) return heads_last(dense(qh, kh, vh, {}, time > 1, scale));
  if (time == 1) {
    const int64_t seen = window < 0 ? size : window;
    return heads_last(dense(qh, kh.slice(2, size - seen), vh.slice(2, size - seen), {}, false, scale));
  }
  if (window < 0 || size <= 2 * window)
    return heads_last(dense(qh, kh, vh, band(time, size, size - time, window, q.device()), false, scale));
  return heads_last(windowed(qh, kh, vh, window, scale));
}

}  // namespace assay::nn
