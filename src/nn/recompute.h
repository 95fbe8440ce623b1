#pragma once
// Activation checkpointing: keep a layer's input, compute its inside again in the backward.          [Chen et al. 2016]
#include <ATen/core/Tensor.h>

#include <functional>

namespace assay::nn {

// layer(x) with the memory of x alone. The layer must be a pure function of x and of parameters that need gradients.
at::Tensor recomputed(const std::function<at::Tensor(const at::Tensor&)>& layer, const at::Tensor& x);

}  // namespace assay::nn
