#pragma once
// The steps of a call, in the order in which they are enqueued; each is a file of its own.
#include <algorithm>
#include <bit>

#include "ops/cuda/types.cuh"
#include "ops/top1_chunk/cuda_lists.cuh"

namespace assay::ops::cuda::top1 {

// Chooses: writes selected. cuda_select.cu
struct SelectWorkspace {
  // what queries are scored against, in the tiles that the scoring kernel takes: keys or means
  bf16* columns;
  float* previous;  // [B, H, T] the score of the rank before, when top_k > 1
  SelectWorkspace(const Top1ChunkForward& p, WorkspaceArena& arena);
};
void select_chunks(const Top1ChunkForward& p, const SelectWorkspace& scratch, Stream stream);

// The same by shortlist. cuda_shortlist.cu, cuda_pairs.cu
inline int64_t pair_slots(const Top1ChunkForward& p) {
  return std::bit_ceil(std::max<uint64_t>(p.shortlist, 4));
}
struct ShortlistWorkspace {
  bf16* columns;     // summaries in tiles
  int slots;         // of a query: the shortlist, padded to a power of two
  uint16_t* listed;  // [B, H, T, slots] chunks, kNoChunk: none
  float* scores;     // [B, H, T, slots] exact scores of these, in base 2
  Lists lists;
  ShortlistWorkspace(const Top1ChunkForward& p, WorkspaceArena& arena);
};
void select_shortlist(const Top1ChunkForward& p, const ShortlistWorkspace& scratch, Stream stream);
// Of the shortlists and of their pairs sorted by chunk.
void pick_pairs(const Top1ChunkForward& p, const ShortlistWorkspace& scratch, Stream stream);

// Attends to each query's own chunk (local), or to those of lists. joins: together with what `out`
// and logsumexp hold, but where the bits of logsumexp are kNothingRead. cuda_forward.cu
constexpr uint32_t kNothingRead = ~0u;
void attend(const Top1ChunkForward& p, const Lists& lists, bool local, bool joins, Stream stream);

// The gradients. cuda_backward.cu
struct GradientWorkspace {
  float* delta;    // [B, H, T] dout · out
  float* partial;  // [B·Hk, segments beyond a chunk's first, 2, keys of a block, D]: dk, dv
  GradientWorkspace(const Top1ChunkBackward& bwd, const Lists& lists, WorkspaceArena& arena);
};
// Of each query's own chunk (local; writes delta, dq, dk and dv), or of the chunks that lists says
// (adds to them).
void chunk_gradients(const Top1ChunkBackward& bwd, const GradientWorkspace& scratch,
                     const Lists& lists, bool local, Stream stream);
}  // namespace assay::ops::cuda::top1
