#include <torch/torch.h>

#include "ops/core/tensors.h"
#include "ops/recurrence/causal_conv1d/causal_conv1d.h"

namespace assay::ops {

std::tuple<at::Tensor, at::Tensor> causal_conv1d_reference(const at::Tensor& x,
                                                           const at::Tensor& weight,
                                                           const OptionalTensor& bias,
                                                           std::string_view activation,
                                                           const OptionalTensor& initial_state) {
  const auto real = real_dtype(sequence_dtype({x}));
  const int64_t width = weight.size(1);
  const int64_t time = x.size(1);
  const at::Tensor past =
      initial_state ? initial_state->to(real).transpose(1, 2)
                    : at::zeros({x.size(0), width - 1, x.size(2)}, x.options().dtype(real));
  const at::Tensor extended = at::cat({past, x.to(real)}, 1);  // [B, K − 1 + T, Dm]
  at::Tensor y = at::zeros_like(x, real);
  for (int64_t j = 0; j < width; ++j)
    y = y + weight.to(real).select(1, j) * extended.narrow(1, j, time);
  if (bias) y = y + bias->to(real);
  if (activation == "silu") y = at::silu(y);
  return {y.to(x.scalar_type()), extended.narrow(1, time, width - 1).transpose(1, 2).contiguous()};
}

}  // namespace assay::ops
