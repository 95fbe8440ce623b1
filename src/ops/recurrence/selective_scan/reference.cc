#include <torch/torch.h>

#include "ops/core/tensors.h"
#include "ops/recurrence/selective_scan/selective_scan.h"

namespace assay::ops {

std::tuple<at::Tensor, at::Tensor> selective_scan_reference(
    const at::Tensor& u, const at::Tensor& delta, const at::Tensor& A, const at::Tensor& B,
    const at::Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
    const OptionalTensor& delta_bias, bool delta_softplus, const OptionalTensor& initial_state) {
  const auto real = real_dtype(sequence_dtype({u, delta, B, C, or_undefined(z)}));
  const int64_t channels = u.size(2);
  const int64_t channels_per_group = channels / B.size(2);
  at::Tensor step = delta.to(real);
  if (delta_bias) step = step + delta_bias->to(real);
  if (delta_softplus) step = at::softplus(step);  // [B, T, Dm]
  const at::Tensor rates = A.dim() == 3 ? A.unsqueeze(2) : A;
  const at::Tensor decay = at::exp(step.unsqueeze(-1) * rates.to(real));  // [B, T, Dm, N]
  const at::Tensor input =
      (step * u.to(real)).unsqueeze(-1) * B.to(real).repeat_interleave(channels_per_group, 2);
  const auto decays = decay.unbind(1);
  const auto inputs = input.unbind(1);
  const auto outputs = C.to(real).repeat_interleave(channels_per_group, 2).unbind(1);
  // [B, Dm, N]
  at::Tensor state = initial_state ? initial_state->to(real) : at::zeros_like(decays[0]);
  std::vector<at::Tensor> y;
  for (size_t t = 0; t < decays.size(); ++t) {
    state = decays[t] * state + inputs[t];
    y.push_back((state * outputs[t]).sum(-1));
  }
  at::Tensor out = at::stack(y, 1);
  if (D) out = out + D->to(real) * u.to(real);
  if (z) out = out * at::silu(z->to(real));
  return {out.to(u.scalar_type()), state};
}

}  // namespace assay::ops
