#include "nn/short_conv.h"

#include <torch/torch.h>

#include <cmath>

#include "ops/causal_conv1d/causal_conv1d.h"

namespace assay::nn {

ShortConv::ShortConv(int64_t channels, int64_t width, bool with_bias, std::string act,
                     double start_std)
    : activation(std::move(act)), start(start_std) {
  if (width < 0 || width > 8)
    fail("conv_width = {} must be 1 to 8, or 0 for no convolution", width);
  if (!(start >= 0) || std::isinf(start))
    fail("conv_std = {} must be positive, or 0 for uniform starting values", start);
  if (width == 0) return;
  weight = register_parameter("weight", torch::zeros({channels, width}));
  if (with_bias) bias = register_parameter("bias", torch::zeros({channels}));
}

at::Tensor ShortConv::forward(const at::Tensor& x, State& state) const {
  if (!weight.defined()) return activation == "silu" ? at::silu(x) : x;
  const auto b = bias.defined() ? std::optional(bias) : std::nullopt;
  auto [y, last] = ops::causal_conv1d(x, weight, b, activation, state.find("conv"));
  state["conv"] = last;
  return y;
}

bool ShortConv::initialise(const std::string& name, at::Tensor& parameter,
                           at::Generator generator) const {
  if (name != "conv.weight" && name != "conv.bias") return false;
  if (start == 0) {
    const double bound = 1 / std::sqrt(double(weight.size(1)));
    parameter.uniform_(-bound, bound, generator);
  } else if (name == "conv.weight") {
    parameter.normal_(0, start, generator);
  } else {
    parameter.zero_();
  }
  return true;
}

}  // namespace assay::nn
