#include "nn/initial_values.h"

#include <torch/torch.h>

#include <cmath>

namespace assay::nn {

void log_uniform_steps(at::Tensor& parameter, at::Generator generator) {
  const at::Tensor u =
      at::empty_like(parameter, at::kDouble).uniform_(std::log(0.001), std::log(0.1), generator);
  const at::Tensor step = u.exp();
  parameter.copy_(step + at::log(-at::expm1(-step)));  // the inverse of softplus
}

void log_of_uniform(at::Tensor& parameter, double low, double high, at::Generator generator) {
  parameter.uniform_(low, high, generator).clamp_min_(1e-4).log_();
}

void uniform_by_width(at::Tensor& parameter, double gain, at::Generator generator) {
  const double bound = gain / std::sqrt(double(parameter.size(1)));
  parameter.uniform_(-bound, bound, generator);
}

bool mamba_projection(const std::string& name, at::Tensor& parameter, const Place& place,
                      at::Generator generator) {
  if (name == "in_proj.weight" || name == "x_proj.weight") {
    uniform_by_width(parameter, 1, generator);
    return true;
  }
  if (name != "out_proj.weight") return false;
  uniform_by_width(parameter, 1 / std::sqrt(double(place.residuals_per_layer * place.num_layers)),
                   generator);
  return true;
}

void orthogonal(at::Tensor& parameter, double gain, at::Generator generator) {
  const int64_t rows = parameter.size(0), columns = parameter.size(1);
  const at::Tensor normal =
      at::randn({std::max(rows, columns), std::min(rows, columns)}, generator, at::kDouble);
  const auto [q, r] = at::linalg_qr(normal);
  const at::Tensor basis = q * r.diagonal().sign();  // the sign makes the distribution uniform
  parameter.copy_(gain * (rows < columns ? basis.t() : basis));
}

}  // namespace assay::nn
