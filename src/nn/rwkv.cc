#include "nn/rwkv.h"

#include <torch/torch.h>

#include "nn/initial_values.h"

namespace assay::nn::rwkv {

std::optional<at::Tensor> before(const at::Tensor& x, State& state, const std::string& name) {
  auto previous = state.find(name);
  const at::Tensor row = x.select(1, -1);
  if (!state.context.last)
    state[name] = x.size(1) > 1 ? row.clone() : row;  // a row alone, not all of x
  return previous;
}

at::Tensor fraction(int64_t count) { return at::arange(count, at::kDouble) / double(count); }
at::Tensor ramp(int64_t count) {
  return at::arange(count, at::kDouble) / double(std::max<int64_t>(count - 1, 1));
}

int64_t default_rank(double factor, int64_t d_model) {
  return std::max<int64_t>(32, std::llround(factor * std::sqrt(double(d_model)) / 32) * 32);
}

at::Tensor decay_start(const Place& place) {
  return 5 * ramp(place.d_model).pow(0.7 + 1.3 * depth(place)) - 6;
}

at::Tensor bonus_start(const Place& place) {
  const at::Tensor zigzag = (at::arange(1, place.d_model + 1, at::kDouble).remainder(3) - 1) * 0.1;
  return depth(place) * (1 - ramp(place.d_model)) + zigzag;
}

void treat_low_rank(LowRank& path, const Start& up, const std::optional<Treatment>& bias) {
  path.down_proj->treatment("weight") = {.start = constant(0)};
  path.up_proj->treatment("weight") = {.start = up};
  if (bias) path.up_proj->treatment("bias") = *bias;
}

std::shared_ptr<Norm> norm_of_heads(const Place& place, int64_t num_heads, double eps) {
  const auto norm = std::make_shared<Norm>("layernorm", place.d_model, eps, num_heads);
  norm->treatment("weight").start =
      constant(std::pow(1 - height(place) + 1 / double(place.num_layers), 0.7));
  return norm;
}

}  // namespace assay::nn::rwkv
