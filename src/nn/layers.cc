#include "nn/layers.h"

#include <torch/torch.h>

#include "base/error.h"
#include "ops/linear/linear.h"
#include "ops/rms_norm/rms_norm.h"

namespace assay::nn {

Linear::Linear(int64_t in, int64_t out, bool with_bias) : weight(register_parameter("weight", torch::zeros({out, in}))) {
  if (with_bias) bias = register_parameter("bias", torch::zeros({out}));
}

at::Tensor Linear::forward(const at::Tensor& x) const {
  return ops::linear(x, weight.to(x.scalar_type()), bias.defined() ? bias.to(x.scalar_type()) : bias);
}

Norm::Norm(const std::string& kind, int64_t size, double eps)
    : weight(register_parameter("weight", torch::ones({size}))), eps(eps) {
  if (kind == "layernorm")
    bias = register_parameter("bias", torch::zeros({size}));
  else if (kind != "rmsnorm")
    fail("unknown norm '{}'{}; there are rmsnorm, layernorm", kind,
         did_you_mean(kind, std::vector<std::string>{"rmsnorm", "layernorm"}));
}

at::Tensor Norm::forward(const at::Tensor& x) const {
  if (!bias.defined()) return ops::rms_norm(x, weight, eps);
  return at::layer_norm(x, weight.sizes(), weight.to(x.scalar_type()), bias.to(x.scalar_type()), eps);
}

std::pair<at::Tensor, at::Tensor> Rotary::angles(const at::Tensor& x, int64_t offset) const {
  const int64_t end = offset + x.size(1);
  const auto real = at::promote_types(x.scalar_type(), at::kFloat);
  if (!cos_.defined() || cos_.size(0) < end || cos_.device() != x.device() || cos_.scalar_type() != real) {
    const auto f64 = at::TensorOptions().dtype(at::kDouble);
    const at::Tensor frequency = at::pow(base_, -at::arange(0, head_dim_, 2, f64) / double(head_dim_));
    const at::Tensor angle = at::outer(at::arange(std::max<int64_t>(end, 256) * 5 / 4, f64), frequency);
    cos_ = angle.cos().to(x.device(), real), sin_ = angle.sin().to(x.device(), real);
  }
  return {cos_.slice(0, offset, end), sin_.slice(0, offset, end)};
}

at::Tensor Rotary::operator()(const at::Tensor& x, int64_t offset) const {
  const auto [c, s] = angles(x, offset);
  const at::Tensor cos = c.to(x.scalar_type()).unsqueeze(1), sin = s.to(x.scalar_type()).unsqueeze(1);  // [T, 1, D/2]
  const auto halves = x.chunk(2, -1);
  return at::cat({halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin}, -1);
}

}  // namespace assay::nn
