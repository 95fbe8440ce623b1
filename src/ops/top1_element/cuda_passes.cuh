#pragma once
// What the steps of a call share, and the steps in the order in which they are enqueued, each a
// file of its own.
#include "ops/cuda/types.cuh"
#include "ops/top1_element/kernel.h"

namespace assay::ops::cuda::element {

// The rows [rows, D] of every head in tiles of 64 (top1::Panels), each tile and all tiles of a head
// one piece of memory: what the copy engine brings in and wgmma reads as it lies.
struct Packed {
  static constexpr int64_t kPadding = 384;  // a multiple of what any block holds or reads at a time
  bf16* data = nullptr;
  int64_t rows = 0;  // of a head: a multiple of kPadding, zeros past the last
  template <int D>
  __device__ const bf16* at(int64_t head, int64_t row) const {
    return data + (head * rows + row) * D;
  }
};

// The operands of the products. `q` has the sign of the scale (0 where it is 0), so that scores
// rise with q·k.
struct Operands {
  Packed q, k, v, dout;
  // [B·H, q.rows] in base 2; dout · soft. +inf and 0 past the last query: it adds nothing
  float *logsumexp, *delta;
  explicit Operands(const Top1ElementForward& p, WorkspaceArena& arena);
  explicit Operands(const Top1ElementBackward& bwd, WorkspaceArena& arena);
};
// Scores are products of packed rows times this, powers of 2; never 0, so that −inf stays
// what it is.
inline float exponent_scale(const Top1ElementForward& p) {
  return std::max(std::abs(float(p.scale)) * kLog2e, 1e-30f);
}

// Fills the operands. cuda_pack.cu
void pack_operands(const Top1ElementForward& p, const Operands& m, Stream stream);
void pack_operands(const Top1ElementBackward& bwd, const Operands& m, Stream stream);

// index and out; logsumexp and soft where they are wanted. cuda_forward.cu
void choose(const Top1ElementForward& p, const Operands& m, Stream stream);

// dq, dk. cuda_backward.cu
void query_gradients(const Top1ElementBackward& bwd, const Operands& m, Stream stream);
void key_gradients(const Top1ElementBackward& bwd, const Operands& m, Stream stream);

// dv: queries sorted by the key that they chose, each key the sum of its queries. cuda_values.cu
struct Choices {
  // [B·H·T] the key chosen, as head · S + position; the query, in [B, H, T]
  uint32_t *key, *item;
  uint32_t *sorted_key, *sorted_item;  // by key, then by query
  // [B·Hk·S] where a key's queries lie in sorted_item; equal where it has none
  uint32_t *begin, *end;
  void* scratch;
  size_t scratch_bytes;
  Choices(const Top1ElementForward& p, WorkspaceArena& arena);
};
void value_gradients(const Top1ElementBackward& bwd, const Choices& choices, Stream stream);

}  // namespace assay::ops::cuda::element
