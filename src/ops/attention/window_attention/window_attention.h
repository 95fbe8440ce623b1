#pragma once
// Causal softmax attention over a window, differentiable. Formula and source: kernel.h
// next to this file.
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace assay::ops {

// q [B, T, H, D]; k, v [B, S, Hkv, D] with S ≥ T: the queries are the last T of the S positions;
// Hkv divides H, and head h reads k and v of head ⌊h Hkv/H⌋. window: positions seen, the own one
// included; −1: all. alibi_slopes [H] or absent. sinks [H] or absent: the softmax of a row of head
// h has one more score, sinks[h], whose value is zero [Agarwal et al. 2025, gpt-oss]. decay_sums
// [B, S, H] or absent: sums of log decays along time; decay_sums_i − decay_sums_j is added to the
// score of position i against j [Lin et al. 2025, eq. 4]. → out [B, T, H, D] in the dtype of q.
// Gradients for every tensor; ValueError naming the argument when shapes or values do not fit.
// Memory is O(T), time O(T·window).
at::Tensor window_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            int64_t window, double scale,
                            const std::optional<at::Tensor>& alibi_slopes = {},
                            const std::optional<at::Tensor>& sinks = {},
                            const std::optional<at::Tensor>& decay_sums = {});

// Reference implementation in tensor arithmetic with all scores in memory, for any device. It does
// not check its arguments.
at::Tensor window_attention_reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      int64_t window, double scale,
                                      const std::optional<at::Tensor>& alibi_slopes = {},
                                      const std::optional<at::Tensor>& sinks = {},
                                      const std::optional<at::Tensor>& decay_sums = {});

// Window attention in tensor arithmetic, a block of queries at a time, recomputed in the backward:
// memory O(T), any device. CUDA runs it where no kernel serves. It does not check its arguments;
// window must be positive.
at::Tensor window_attention_blocked(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    int64_t window, double scale,
                                    const std::optional<at::Tensor>& alibi_slopes = {},
                                    const std::optional<at::Tensor>& sinks = {},
                                    const std::optional<at::Tensor>& decay_sums = {});

// Which kernels serve this operator on CUDA from now on, in the whole process: "deterministic"
// (as in training: the kernels of this folder, and, where they do not serve, torch's choice
// among those that give the same bits twice), "torch" (torch's choice among all), "cudnn" or
// "flash-2" (that one of torch or, for full attention, an error). Where it is not "deterministic",
// no other operation of torch is held to it either.
void choose_full_attention(const std::string& kernel);

}  // namespace assay::ops
