#include <torch/torch.h>

#include <numbers>

#include "ops/core/tensors.h"
#include "ops/recurrence/linear_attention/linear_attention.h"
#include "ops/rowwise/mamba3_elements/mamba3_elements.h"

namespace assay::ops {
namespace {

at::Tensor wide(const at::Tensor& x) { return x.to(real_dtype(x.scalar_type())); }
at::Tensor by_head(const at::Tensor& x, const at::Tensor& factor) {
  return wide(x).unflatten(-1, {factor.size(-1), -1}) * factor.unsqueeze(-1);
}

}  // namespace

Mamba3Rotated mamba3_rotate_reference(const at::Tensor& b, const at::Tensor& c,
                                      const at::Tensor& b_bias, const at::Tensor& c_bias,
                                      const at::Tensor& steps, const at::Tensor& turns,
                                      const OptionalTensor& angle) {
  const int64_t pairs = turns.size(-1);
  const at::Tensor added = steps.unsqueeze(-1) * turns.unsqueeze(2);
  // sums along time, as linear attention with queries and keys of 1, which has kernels
  const at::Tensor one =
      at::ones({1, 1, 1, 1}, added.options()).expand({b.size(0), b.size(1), 1, 1});
  const OptionalTensor first = angle ? OptionalTensor(angle->unsqueeze(2)) : OptionalTensor();
  const auto [angles, last] = linear_attention(one, one, added, 1, first);
  const at::Tensor turn = at::polar(at::ones_like(angles), angles);  // complex
  const auto rotated = [&](const at::Tensor& x, const at::Tensor& bias) {
    const at::Tensor of_group = bias.unflatten(0, {x.size(2), -1});
    const at::Tensor heads = (wide(x).unsqueeze(3) + of_group).flatten(2, 3);
    const at::Tensor rotating = heads.narrow(-1, 0, 2 * pairs).unflatten(-1, {pairs, 2});
    const at::Tensor both = at::view_as_real(at::view_as_complex(rotating.contiguous()) * turn);
    return at::cat({both.flatten(-2), heads.slice(-1, 2 * pairs)}, -1).to(x.scalar_type());
  };
  const at::Tensor rotated_b = rotated(b, b_bias);
  const at::Tensor rotated_c = rotated(c, c_bias);
  return {rotated_b, rotated_c, (wide(rotated_b) * wide(rotated_c)).sum(-1),
          at::remainder(last.squeeze(2), 2 * std::numbers::pi)};
}

Mamba3Written mamba3_write_reference(const at::Tensor& x, const at::Tensor& factor) {
  return {by_head(x, factor).flatten(-2).to(x.scalar_type()), x};
}

at::Tensor mamba3_output_reference(const at::Tensor& y, const at::Tensor& x, const at::Tensor& z,
                                   const at::Tensor& skip) {
  return ((wide(y) + by_head(x, skip).flatten(-2)) * at::silu(wide(z))).to(y.scalar_type());
}

}  // namespace assay::ops
