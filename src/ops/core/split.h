#pragma once
// Parts of the rows of one tensor whose gradients are written to one tensor, without a copy.
#include <ATen/core/Tensor.h>

#include <vector>

namespace assay::ops {

// x [..., ΣD] → views [..., D] for the D of `sizes`, differentiable. The gradient of x is one
// tensor. An operator that takes the memory for the gradient of its input from gradient_memory()
// writes a part of it in place; gradients from elsewhere are copied.
std::vector<at::Tensor> split(const at::Tensor& x, at::IntArrayRef sizes);

// For backward functions: uninitialised memory for the gradient of `input`, which they saved. If
// `input` is a whole part of split(), in any shape, the memory has the strides of `input`, and the
// first caller gets its part of the gradient; else it is contiguous.
at::Tensor gradient_memory(const at::Tensor& input);

}  // namespace assay::ops
