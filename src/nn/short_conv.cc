#include "nn/short_conv.h"

#include <torch/torch.h>

#include <cmath>

#include "nn/initial_values.h"
#include "ops/recurrence/causal_conv1d/causal_conv1d.h"

namespace assay::nn {

ShortConv::ShortConv(int64_t channels, int64_t width, bool with_bias, std::string act, double start)
    : activation(std::move(act)) {
  if (width < 0 || width > 8)
    fail("conv_width = {} must be 1 to 8, or 0 for no convolution", width);
  if (!(start >= 0) || std::isinf(start))
    fail("conv_std = {} must be positive, or 0 for uniform starting values", start);
  if (width == 0) return;
  const Start unit = uniform(1 / std::sqrt(double(width)));
  weight = add_parameter("weight", torch::zeros({channels, width}),
                         {.start = start > 0 ? normal(start) : unit, .weight_decay = true});
  if (with_bias)
    bias =
        add_parameter("bias", torch::zeros({channels}), {.start = start > 0 ? constant(0) : unit});
}

std::vector<at::Tensor> ShortConv::forward(const at::Tensor& x, State& state,
                                           at::IntArrayRef parts) const {
  if (!weight.defined())
    return (activation == "silu" ? at::silu(x) : x).split_with_sizes(parts, -1);
  const auto b = bias.defined() ? std::optional(bias) : std::nullopt;
  auto [y, last] = ops::causal_conv1d_parts(x, weight, b, activation, state.find("conv"), parts);
  state["conv"] = last;
  return y;
}

at::Tensor ShortConv::forward(const at::Tensor& x, State& state) const {
  return forward(x, state, x.sizes().slice(2))[0];
}

}  // namespace assay::nn
