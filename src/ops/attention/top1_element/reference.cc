#include <torch/torch.h>

#include "ops/attention/top1_element/top1_element.h"
#include "ops/core/tensors.h"

namespace assay::ops {

std::tuple<at::Tensor, at::Tensor> top1_element_reference(const at::Tensor& q, const at::Tensor& k,
                                                          const at::Tensor& v, double scale) {
  const auto real = real_dtype(sequence_dtype({q, k, v}));
  const int64_t time = q.size(1);
  const int64_t size = k.size(1);
  const int64_t group = q.size(2) / k.size(2);
  const auto heads_first = [&](const at::Tensor& x) { return x.to(real).transpose(1, 2); };
  const at::Tensor keys = heads_first(k).repeat_interleave(group, 1);
  const at::Tensor values = heads_first(v).repeat_interleave(group, 1);
  const at::Tensor positions = at::arange(size, q.options().dtype(at::kLong));
  const at::Tensor later = positions > positions.slice(0, size - time).unsqueeze(1);  // [T, S]
  const at::Tensor logits = (scale * heads_first(q).matmul(keys.mT()))
                                .masked_fill(later, -std::numeric_limits<double>::infinity());
  // the first of equal ones
  const at::Tensor soft = logits.softmax(-1);
  const at::Tensor index = logits.argmax(-1);
  const at::Tensor weights = at::one_hot(index, size).to(real) + (soft - soft.detach());
  return {weights.matmul(values).transpose(1, 2).to(q.scalar_type()), index};
}

}  // namespace assay::ops
