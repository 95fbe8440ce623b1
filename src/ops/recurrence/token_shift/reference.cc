#include <torch/torch.h>

#include "ops/recurrence/token_shift/token_shift.h"

namespace assay::ops {

std::vector<at::Tensor> token_shift_reference(const at::Tensor& x,
                                              const std::optional<at::Tensor>& before,
                                              const at::Tensor& mix,
                                              const std::vector<at::Tensor>& own) {
  const at::Tensor first = before.value_or(at::zeros_like(x.select(1, 0))).unsqueeze(1);
  const at::Tensor delta = at::cat({first, x.slice(1, 0, -1)}, 1) - x;
  std::vector<at::Tensor> y;
  for (int64_t i = 0; i < mix.size(0); ++i)
    y.push_back((x + delta * (own.empty() ? mix[i] : mix[i] + own[size_t(i)])).to(x.scalar_type()));
  return y;
}

}  // namespace assay::ops
