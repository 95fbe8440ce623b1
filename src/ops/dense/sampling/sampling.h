#pragma once
// Tokens drawn from logits, on the device of the logits. Definition: kernel.h next to this file.
#include <ATen/core/Tensor.h>

#include <span>

#include "ops/dense/sampling/kernel.h"

namespace assay::ops {

// logits [B, V]; one draw per row → tokens [B] i64 on the device of logits, −1 for a row with a NaN
// or without a finite largest logit. Devices may choose different tokens where `uniform` is within
// the rounding of a running weight (about 1e-7). ValueError when the shapes do not fit.
at::Tensor sample(const at::Tensor& logits, std::span<const Draw> draws);

// As above, with draws of tensor_of() on the device of logits, where a captured step reads them.
at::Tensor sample(const at::Tensor& logits, const at::Tensor& draws);
// The bytes of draws on the CPU, [B, sizeof(Draw)] u8.
at::Tensor tensor_of(std::span<const Draw> draws);

}  // namespace assay::ops
