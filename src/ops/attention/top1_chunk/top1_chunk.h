#pragma once
// Top-1 Chunk attention, differentiable. Formula, shapes and source: kernel.h in this folder.
#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace assay::ops {

// q [B, T, H, D]; k, v [B, S, Hk, D], S ≥ T: the queries are the last T of S positions, and chunk c
// holds positions [c·chunk_size, (c + 1)·chunk_size) whatever T is, so a sequence may be cut
// anywhere. Hk divides H. selection: "exact" or "approx". selected [B, H, T, top_k] int64 forces
// the choice; what is no candidate of its query counts as −1, and a chunk that is named twice
// counts twice in the softmax. summaries, which approx reads: chunk_summaries(k, chunk_size), by a
// caller who keeps them; or more chunks of it. Only their shape is checked, so those of a smaller
// chunk_size give a wrong choice. Returns out [B, T, H, D] in the dtype of q, logsumexp [B, H, T]
// in float32 (float64 when anything of q, k, v is) and the choice [B, H, T, top_k] int64, best
// first, −1 for none. Gradients for q, k, v through out alone. float64, float32, bfloat16.
// ValueError naming the argument when a shape, dtype or value does not fit. NaN in a query gives a
// row of NaN; a chunk with a NaN score counts as the best. Few queries of many positions (decoding)
// read the summaries, or (exact) all keys, and the chunks chosen.
std::tuple<at::Tensor, at::Tensor, at::Tensor> top1_chunk(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t chunk_size, double scale,
    std::string_view selection = "exact", int64_t top_k = 1,
    const std::optional<at::Tensor>& selected = {},
    const std::optional<at::Tensor>& summaries = {});

// One decode step of sequences at positions of their own, on CUDA without gradients. q [B, H, D],
// k, v [B, Hk, D] of the new tokens, in bfloat16 or float32; positions [B] int64 of the new tokens,
// −1 for a row that is not used (its output is 0); caches [B, 2] int64, for "approx" [B, 3]: the
// addresses of the keys and values of each row, [> position, Hk, D], and of its chunk_summaries,
// [≥ (position + 1) / chunk_size, Hk, 1 (bfloat16: 2), D], each contiguous and beginning at a
// multiple of 16 bytes. It writes k and v there, and the summary of a chunk that they complete. All
// positions are below `capacity`. Positions and addresses are read by the kernel, and are not
// checked. selection: "exact" or "approx". Returns [B, H, D] in the dtype of q. ValueError when a
// shape, dtype or value does not fit.
at::Tensor top1_chunk_decode(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const at::Tensor& positions, const at::Tensor& caches,
                             int64_t chunk_size, double scale, std::string_view selection,
                             int64_t top_k, int64_t capacity);
// Whether it serves such inputs, for a capacity of 2^18 at least.
bool top1_chunk_decode_serves(const at::TensorOptions& options, int64_t head_dim,
                              int64_t chunk_size, std::string_view selection, int64_t top_k);

// top1_chunk from tensor arithmetic with [T, S] matrices: defines what is right; any device.
// Nothing is checked.
std::tuple<at::Tensor, at::Tensor, at::Tensor> top1_chunk_reference(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t chunk_size, double scale,
    std::string_view selection = "exact", int64_t top_k = 1,
    const std::optional<at::Tensor>& selected = {},
    const std::optional<at::Tensor>& summaries = {});

// The choice alone, [B, H, T, top_k], from tensor arithmetic with few queries at a time.
at::Tensor top1_chunk_choice(const at::Tensor& q, const at::Tensor& k, int64_t chunk_size,
                             double scale, std::string_view selection, int64_t top_k,
                             const std::optional<at::Tensor>& summaries = {});

// The mean μ of each full chunk of k [B, S, Hk, D]: [B, ⌊S / chunk_size⌋, Hk, 1, D] in float32
// (float64 for float64), no gradient. The summaries of bfloat16 keys are bfloat16,
// [B, …, Hk, 2, D]: μ less its rounded value, and μ rounded, so that a step can leave the first
// unread.
at::Tensor chunk_summaries(const at::Tensor& k, int64_t chunk_size);

// Those of bfloat16 keys as those of float32: [B, chunks, Hk, 1, D].
at::Tensor joined_summaries(const at::Tensor& parts);

}  // namespace assay::ops
