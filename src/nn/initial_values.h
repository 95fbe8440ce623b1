#pragma once
// Starting values that several architectures share. Each overwrites `parameter`.
#include <ATen/core/Tensor.h>

#include <string>

#include "nn/mixer.h"

namespace assay::nn {

// softplus(parameter) log-uniform in [0.001, 0.1]: the step sizes of Mamba and its kin.
void log_uniform_steps(at::Tensor& parameter, at::Generator);
// ln of a uniform in [low, high].
void log_of_uniform(at::Tensor& parameter, double low, double high, at::Generator);
// A matrix [out, in] uniform in ±gain / √in: with gain 1 what torch.nn.Linear starts with.
void uniform_by_width(at::Tensor& parameter, double gain, at::Generator);
// in_proj, x_proj and out_proj as state-spaces/mamba and Longhorn start them: uniform in ±1/√in,
// out_proj divided by √(residual branches of the model). Returns false for any other name.
bool mamba_projection(const std::string& name, at::Tensor& parameter, const Place& place,
                      at::Generator);
// A matrix [rows, columns] with orthonormal rows or columns (the shorter), times gain. [Saxe
// et al. 2013]
void orthogonal(at::Tensor& parameter, double gain, at::Generator);

}  // namespace assay::nn
