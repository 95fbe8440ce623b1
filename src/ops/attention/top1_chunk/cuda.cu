// Which calls the kernels take, and their steps.
#include <optional>

#include "ops/attention/top1_chunk/cuda_passes.cuh"
#include "ops/cuda/attention.cuh"

namespace assay::ops::cuda {
namespace {

using namespace top1;

// the sort counts the chunks in shared memory
constexpr int64_t kMaxChunk = 256;
constexpr int64_t kMaxChunks = 50000;

struct ForwardWorkspace {
  Lists lists;
  int* finished;  // [B·Hk, chunks] scratch of attend()
  std::optional<SelectWorkspace> select;
  ForwardWorkspace(const Top1ChunkForward& p, WorkspaceArena& arena)
      : lists(p, arena), finished(arena.take<int>(p.batch * p.kv_heads * lists.chunks)) {
    if (!p.forced) select.emplace(p, arena);
  }
};
struct BackwardWorkspace {
  Lists lists;
  GradientWorkspace gradients;
  BackwardWorkspace(const Top1ChunkBackward& bwd, WorkspaceArena& arena)
      : lists(bwd.forward, arena), gradients(bwd, lists, arena) {}
};

}  // namespace

const char* why_unsupported(const Top1ChunkForward& p) {
  if (p.past != 0) return "takes as many keys as queries";
  if (p.dtype != DType::bf16) return "takes bfloat16 only";
  if (const char* why_not = why_not_head_dim(p.head_dim)) return why_not;
  if (p.chunk_size < 1 || p.chunk_size > kMaxChunk) return "takes a chunk_size of 1 to 256";
  if (ceil_div(p.time, p.chunk_size) > kMaxChunks) return "takes 50,000 chunks at most";
  if (p.batch * p.heads >= 1 << 16) return "takes fewer than 2^16 heads of the batch";
  if (p.heads / p.kv_heads * p.time >= int64_t{1} << 30)
    return "takes fewer than 2^30 queries per key head";
  return why_unaligned({p.q, p.k, p.v, p.out});
}

size_t workspace_bytes(const Top1ChunkForward& p) { return workspace_size<ForwardWorkspace>(p); }
size_t workspace_bytes(const Top1ChunkBackward& bwd) {
  return workspace_size<BackwardWorkspace>(bwd);
}

void top1_chunk(const Top1ChunkForward& p, void* workspace, Stream stream) {
  check("top1_chunk", why_unsupported(p));
  const auto scratch = workspace_at<ForwardWorkspace>(workspace, p);
  if (scratch.select) select_chunks(p, *scratch.select, stream);
  const bool chosen = p.time > p.chunk_size;
  for (int rank = 0; rank == 0 || (rank < p.top_k && chosen); ++rank) {
    if (chosen) sort_queries(p, scratch.lists, rank, stream);
    attend(p, scratch.lists, /*own=*/rank == 0, chosen, scratch.finished, stream);
  }
}

void top1_chunk(const Top1ChunkBackward& bwd, void* workspace, Stream stream) {
  const Top1ChunkForward& p = bwd.forward;
  check("top1_chunk", why_unsupported(p));
  check("top1_chunk", why_unaligned({bwd.dout, bwd.dq, bwd.dk, bwd.dv}));
  const auto scratch = workspace_at<BackwardWorkspace>(workspace, bwd);
  const bool chosen = p.time > p.chunk_size;
  for (int rank = 0; rank == 0 || (rank < p.top_k && chosen); ++rank) {
    if (chosen) sort_queries(p, scratch.lists, rank, stream);
    chunk_gradients(bwd, scratch.gradients, scratch.lists, /*own=*/rank == 0, chosen, stream);
  }
}

}  // namespace assay::ops::cuda
