#pragma once
// Helpers for the tests of nn. Include <torch/torch.h> first.
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <string>

#include "base/files.h"
#include "base/random.h"
#include "golden_files.h"
#include "nn/language_model.h"

namespace assay::nn {

// ‖a − b‖ / ‖b‖
inline double relative_error(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.detach().to(at::kDouble);
  const at::Tensor y = b.detach().to(at::kDouble);
  return ((x - y).norm() / y.norm().clamp_min(1e-300)).item<double>();
}

inline at::Generator generator(const std::string& name) {
  return at::make_generator<at::CPUGeneratorImpl>(purpose(name));
}

inline std::shared_ptr<LanguageModel> make_model(const std::string& toml) {
  return std::make_shared<LanguageModel>(ModelSpec::read(ConfigNode::parse(toml).child("model")));
}
// make_model() with random weights, in float64.
inline std::shared_ptr<LanguageModel> random_model(const std::string& toml, uint64_t seed = 1) {
  auto model = make_model(toml);
  model->initialise(seed);
  const at::NoGradGuard no_grad;
  at::Generator noise = generator(toml);
  for (auto& parameter : model->parameters())
    parameter.add_(at::randn(parameter.sizes(), noise), 0.1);
  model->to(at::kDouble);
  return model;
}
inline at::Tensor random_tokens(int64_t batch, int64_t time, int64_t vocabulary,
                                const std::string& name) {
  return at::randint(0, vocabulary, {batch, time}, generator(name), at::kLong);
}

}  // namespace assay::nn
