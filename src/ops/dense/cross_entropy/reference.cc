#include <torch/torch.h>

#include "ops/core/tensors.h"
#include "ops/dense/cross_entropy/cross_entropy.h"

namespace assay::ops {

at::Tensor cross_entropy_reference(const at::Tensor& logits, const at::Tensor& targets) {
  const at::Tensor x = logits.to(real_dtype(logits.scalar_type()));
  return x.logsumexp(1) - x.gather(1, targets.unsqueeze(1)).squeeze(1);
}

}  // namespace assay::ops
