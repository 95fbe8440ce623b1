#include "nn/initial_values.h"

#include <torch/torch.h>

#include <cmath>

#include "nn/mixer.h"

namespace assay::nn {

Start normal(double deviation) {
  return [=](at::Tensor& parameter, const at::Generator& generator) {
    parameter.normal_(0, deviation, generator);
  };
}

Start uniform(double bound) {
  return [=](at::Tensor& parameter, const at::Generator& generator) {
    parameter.uniform_(-bound, bound, generator);
  };
}

Start constant(double value) {
  return [=](at::Tensor& parameter, const at::Generator&) { parameter.fill_(value); };
}

Start values(const at::Tensor& all) {
  return
      [=](at::Tensor& parameter, const at::Generator&) { parameter.copy_(all.view_as(parameter)); };
}

Start log_uniform_steps() {
  return [](at::Tensor& parameter, const at::Generator& generator) {
    const at::Tensor u =
        at::empty_like(parameter, at::kDouble).uniform_(std::log(0.001), std::log(0.1), generator);
    const at::Tensor step = u.exp();
    parameter.copy_(step + at::log(-at::expm1(-step)));  // the inverse of softplus
  };
}

Start log_of_uniform(double low, double high) {
  return [=](at::Tensor& parameter, const at::Generator& generator) {
    parameter.uniform_(low, high, generator).clamp_min_(1e-4).log_();
  };
}

Start uniform_by_width(double gain) {
  return [=](at::Tensor& parameter, const at::Generator& generator) {
    const double bound = gain / std::sqrt(double(parameter.size(1)));
    parameter.uniform_(-bound, bound, generator);
  };
}

Start mamba_output(const Place& place) {
  return uniform_by_width(1 / std::sqrt(double(place.residuals_per_layer * place.num_layers)));
}

Start orthogonal(double gain) {
  return [=](at::Tensor& parameter, const at::Generator& generator) {
    const int64_t rows = parameter.size(0);
    const int64_t columns = parameter.size(1);
    const at::Tensor random =
        at::randn({std::max(rows, columns), std::min(rows, columns)}, generator, at::kDouble);
    const auto [q, r] = at::linalg_qr(random);
    const at::Tensor basis = q * r.diagonal().sign();  // the sign makes the distribution uniform
    parameter.copy_(gain * (rows < columns ? basis.t() : basis));
  };
}

void start_outputs(const torch::nn::Module& module, int64_t num_layers) {
  const Start of_output = normal(kMatrixDeviation / std::sqrt(2.0 * double(num_layers)));
  for (Linear* linear : linears_of(module))
    if (Start& start = linear->treatment("weight").start; !start) start = of_output;
}

}  // namespace assay::nn
