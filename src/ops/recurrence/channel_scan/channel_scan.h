#pragma once
// The scan of kernel.h in this folder on tensors, differentiable: what longhorn
// and selective_scan call.
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

#include "ops/recurrence/channel_scan/kernel.h"

namespace assay::ops {

// As an op has them: x, delta, z [B, T, Dm]; k, q [B, T, N]; D, delta_bias [Dm]; initial_state
// [B, Dm, N]. rate is there in Update::decay alone: [B, T, N], or [Dm, N], where k and q may be
// [B, T, G, N]. Shapes are checked by the op.
// For a few steps rate may also be [H], of heads of `head_dim` channels, with delta [B, T, H] and
// D, delta_bias [H].
struct ChannelScan {
  Update update;
  bool delta_softplus = false;
  at::Tensor x;
  at::Tensor delta;
  at::Tensor k;
  at::Tensor q;
  at::Tensor rate;
  std::optional<at::Tensor> D;
  std::optional<at::Tensor> z;
  std::optional<at::Tensor> delta_bias;
  std::optional<at::Tensor> initial_state;
  int64_t head_dim = 1;
};

// On CUDA, float32 or bfloat16, at most kMaxTokenStates states.
bool on_token_kernel(const ChannelScan&);
// On CUDA, float32 or bfloat16, few tokens, at most kMaxDecodeStates states, no gradient wanted:
// by_token_kernel() then takes one step after another, in one kernel that reads every argument
// as it is.
bool in_few_steps(const ChannelScan&);
// y [B, T, Dm] in the dtype of x, and the last state [B, Dm, N] in float32. Where
// on_token_kernel() or in_few_steps().
std::tuple<at::Tensor, at::Tensor> by_token_kernel(const ChannelScan&);
// Update::decay of tensor arithmetic, any device; the state is float64 where a sequence is. Pieces
// of 64 tokens, in each a prefix over (decay, input) pairs in six doublings, computed again in the
// backward: no [T, Dm, N] stays in memory.
std::tuple<at::Tensor, at::Tensor> by_prefixes(const ChannelScan&);

// The text of `assay doctor` for the CUDA path of an operator. `otherwise`: the path where the
// kernel does not serve.
std::string token_kernel_path(const std::string& otherwise);

}  // namespace assay::ops
