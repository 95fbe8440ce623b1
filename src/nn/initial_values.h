#pragma once
// Starting values that several architectures share.
#include "nn/layers.h"

namespace assay::nn {

struct Place;

// Standard deviation of matrices whose architecture specifies no other value.
constexpr double kMatrixDeviation = 0.02;

Start normal(double deviation);
Start uniform(double bound);  // in ±bound
Start constant(double value);
Start values(const at::Tensor& all);  // of the same number of elements
// softplus(parameter) log-uniform in [0.001, 0.1]: the step sizes of Mamba and its kin.
Start log_uniform_steps();
Start log_of_uniform(double low, double high);  // ln of a uniform in [low, high]
// A matrix [out, in] uniform in ±gain / √in: with gain 1 what torch.nn.Linear starts with.
Start uniform_by_width(double gain = 1);
// The output projection of Mamba and Longhorn: uniform in ±1 / √in, divided by √(residual branches
// of the model).
Start mamba_output(const Place& place);
// A matrix [rows, columns] with orthonormal rows or columns (the shorter), times gain. [Saxe
// et al. 2013]
Start orthogonal(double gain);

// Gives the outputs among the projections below `module` the start N(0, 0.02 / √(2 layers)), unless
// they have another.
void start_outputs(const torch::nn::Module& module, int64_t num_layers);

}  // namespace assay::nn
