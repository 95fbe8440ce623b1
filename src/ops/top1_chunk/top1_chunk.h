#pragma once
// Top-1 Chunk attention, differentiable. Formula, shapes and source: kernel.h beside this file.
#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace assay::ops {

// q [B, T, H, D]; k, v [B, S, Hk, D], S ≥ T: the queries are the last T of S positions, and chunk c holds positions
// [c·chunk_size, (c + 1)·chunk_size) whatever T is, so a sequence may be cut anywhere. Hk divides H. selection:
// "exact", "approx" or "shortlist". selected [B, H, T, top_k] int64 forces the choice; what is no candidate of its
// query counts as −1. Returns out [B, T, H, D] in the dtype of q, logsumexp [B, H, T] in float32 (float64 when anything
// of q, k, v is) and the choice [B, H, T, top_k] int64, best first, −1 for none. Gradients for q, k, v through out
// alone. float64, float32, bfloat16. ValueError naming the argument when a shape, dtype or value does not fit. NaN in a
// query gives a row of NaN; a chunk with a NaN score counts as the best.
std::tuple<at::Tensor, at::Tensor, at::Tensor> top1_chunk(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                          int64_t chunk_size, double scale,
                                                          std::string_view selection = "exact", int64_t top_k = 1,
                                                          const std::optional<at::Tensor>& selected = {});

// The same from tensor arithmetic with [T, S] matrices: defines what is right; any device. Nothing is checked.
std::tuple<at::Tensor, at::Tensor, at::Tensor> top1_chunk_reference(const at::Tensor& q, const at::Tensor& k,
                                                                    const at::Tensor& v, int64_t chunk_size,
                                                                    double scale, std::string_view selection = "exact",
                                                                    int64_t top_k = 1,
                                                                    const std::optional<at::Tensor>& selected = {});

}  // namespace assay::ops
