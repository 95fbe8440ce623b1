#pragma once
// Starting values that several architectures share. Each overwrites `parameter`.
#include <ATen/core/Tensor.h>

namespace assay::nn {

// softplus(parameter) log-uniform in [0.001, 0.1]: the step sizes of Mamba and its kin.
void log_uniform_steps(at::Tensor& parameter, at::Generator);
// ln of a uniform in [low, high].
void log_of_uniform(at::Tensor& parameter, double low, double high, at::Generator);
// A matrix [rows, columns] with orthonormal rows or columns (the shorter), times gain.               [Saxe et al. 2013]
void orthogonal(at::Tensor& parameter, double gain, at::Generator);

}  // namespace assay::nn
