#include "nn/rwkv.h"

#include <torch/torch.h>

#include "nn/initial_values.h"

namespace assay::nn::rwkv {

std::optional<at::Tensor> before(const at::Tensor& x, State& state, const std::string& name) {
  auto previous = state.find(name);
  const at::Tensor row = x.select(1, -1);
  if (!state.last) state[name] = x.size(1) > 1 ? row.clone() : row;  // a row alone, not all of x
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

ParameterGroup time_mix_group(const std::string& name, const at::Tensor& parameter) {
  if (name == "decay" || name == "decay.up_proj.bias") return {.learning_rate = 2};
  const bool low_rank = name.ends_with("down_proj.weight") || name.ends_with("up_proj.weight") ||
                        name == "mix_proj.weight";
  return low_rank ? ParameterGroup() : default_group(name, parameter);
}

bool initialise_time_mix(const std::string& name, at::Tensor& parameter, const Place& place,
                         at::Generator generator) {
  if (name == "norm.weight")
    parameter.fill_(std::pow(1 - height(place) + 1 / double(place.num_layers), 0.7));
  else if (name == "r_proj.weight" || name == "v_proj.weight") orthogonal(parameter, 1, generator);
  else if (name == "k_proj.weight" || name == "g_proj.weight")
    orthogonal(parameter, 0.1, generator);
  else if (name == "out_proj.weight") parameter.zero_();
  else return false;
  return true;
}

}  // namespace assay::nn::rwkv
