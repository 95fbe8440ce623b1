#pragma once
// Top-1 Chunk attention by torch's FlashAttention-2, for GPUs and shapes without own kernels.
#include <ATen/core/Tensor.h>

#include <tuple>

namespace assay::ops {

// Why flash_top1_chunk() does not serve these tensors, or null.
const char* why_no_flash(const at::Tensor& q, const at::Tensor& k, int64_t chunk_size);

// As top1_chunk() on CUDA, with a given choice: q [B, T, H, D], k, v [B, T, Hk, D] in bfloat16,
// selected [B, H, T, top_k] int64, −1 for none. Returns out [B, T, H, D] and logsumexp [B, H, T] in
// float32. Memory O(top_k T).
std::tuple<at::Tensor, at::Tensor> flash_top1_chunk(const at::Tensor& q, const at::Tensor& k,
                                                    const at::Tensor& v, const at::Tensor& selected,
                                                    int64_t chunk_size, double scale);

}  // namespace assay::ops
