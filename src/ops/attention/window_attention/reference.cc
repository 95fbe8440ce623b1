#include <torch/torch.h>

#include "ops/attention/window_attention/window_attention.h"
#include "ops/core/tensors.h"

namespace assay::ops {

at::Tensor window_attention_reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      int64_t window, double scale,
                                      const OptionalTensor& alibi_slopes,
                                      const OptionalTensor& sinks,
                                      const OptionalTensor& decay_sums) {
  const auto real = real_dtype(sequence_dtype({q, k, v}));
  const int64_t time = q.size(1);
  const int64_t size = k.size(1);
  const int64_t group = q.size(2) / k.size(2);
  // [B, H, ·, D]
  const auto heads_first = [&](const at::Tensor& x) { return x.to(real).transpose(1, 2); };
  const auto repeated = [&](const at::Tensor& x) {
    return heads_first(x).repeat_interleave(group, 1);
  };
  const auto positions = at::arange(size, q.options().dtype(real));
  const at::Tensor distance = positions.slice(0, size - time).unsqueeze(1) - positions;  // [T, S]
  // [B, H, T, S]
  at::Tensor scores = scale * heads_first(q).matmul(repeated(k).transpose(-2, -1));
  if (alibi_slopes) scores = scores - alibi_slopes->to(real).view({-1, 1, 1}) * distance;
  if (decay_sums) {
    const at::Tensor sums = decay_sums->to(real).transpose(1, 2);  // [B, H, S]
    scores = scores + sums.slice(2, size - time).unsqueeze(3) - sums.unsqueeze(2);
  }
  const at::Tensor unseen =
      (distance < 0).logical_or(distance >= double(window < 0 ? size : window));
  scores = scores.masked_fill(unseen, -INFINITY);
  if (sinks) {
    const at::Tensor column = sinks->to(real).view({-1, 1, 1});
    scores = at::cat({scores, column.expand({q.size(0), q.size(2), time, 1})}, -1);
  }
  const at::Tensor weights = scores.softmax(-1).narrow(-1, 0, size);
  return weights.matmul(repeated(v)).transpose(1, 2).to(q.scalar_type());
}

}  // namespace assay::ops
