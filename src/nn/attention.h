#pragma once
// Causal softmax attention over a window, with the paths that torch offers.
#include <ATen/core/Tensor.h>

#include <string>

namespace assay::nn {

//   out_t = Σ_{j ∈ N(t)} softmax_j(scale · q_t·k_j) v_j        N(t) = {j ≤ t} or, with a window, {t − window < j ≤ t}
// q [B, T, H, D]; k, v [B, S, Hkv, D] with S ≥ T: the queries are the last T of the S positions. Hkv divides H.
// window: positions seen, the own one included; −1: all. → [B, T, H, D]
// Cost grows with T·S, or with T·window on paths that cut the sequence into blocks.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t window, double scale);

}  // namespace assay::nn
