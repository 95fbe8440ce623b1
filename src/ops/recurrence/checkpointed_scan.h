#pragma once
// A long sequence through a differentiable function of short pieces, with the memory of the inputs
// and one piece.
#include <ATen/core/Tensor.h>

#include <functional>
#include <tuple>
#include <vector>

namespace assay::ops {

// One piece of every sequence [B, t, …] and the state before it → (out [B, t, …], state after it),
// in differentiable tensor arithmetic. It may be called again in the backward, and keeps nothing.
using Piece = std::function<std::tuple<at::Tensor, at::Tensor>(
    const std::vector<at::Tensor>& sequences, const at::Tensor& state)>;

// `piece` over pieces of `length` steps (the last may be shorter), each with the state that the one
// before it left. Tensors of one step (size(1) == 1) are the same for every piece; undefined ones
// stay undefined. Keeps the inputs and the state before each piece; the backward computes each
// piece again. Gradients for all, summed in order of time.
std::tuple<at::Tensor, at::Tensor> scan_with_recompute(const Piece& piece,
                                                       const std::vector<at::Tensor>& sequences,
                                                       const at::Tensor& initial_state,
                                                       int64_t time, int64_t length);

}  // namespace assay::ops
