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
  ForwardWorkspace(const Top1ChunkForward& args, WorkspaceArena& arena)
      : lists(args, arena), finished(arena.take<int>(args.batch * args.kv_heads * lists.chunks)) {
    if (!args.forced) select.emplace(args, arena);
  }
};
struct BackwardWorkspace {
  Lists lists;
  GradientWorkspace gradients;
  BackwardWorkspace(const Top1ChunkBackward& bwd, WorkspaceArena& arena)
      : lists(bwd.forward, arena), gradients(bwd, lists, arena) {}
};

}  // namespace

const char* why_unsupported(const Top1ChunkForward& args) {
  if (args.past != 0) return "takes as many keys as queries";
  if (args.dtype != DType::bf16) return "takes bfloat16 only";
  if (const char* why_not = why_not_head_dim(args.head_dim)) return why_not;
  if (args.chunk_size < 1 || args.chunk_size > kMaxChunk) return "takes a chunk_size of 1 to 256";
  if (ceil_div(args.time, args.chunk_size) > kMaxChunks) return "takes 50,000 chunks at most";
  if (args.batch * args.heads >= 1 << 16) return "takes fewer than 2^16 heads of the batch";
  if (args.heads / args.kv_heads * args.time >= int64_t{1} << 30)
    return "takes fewer than 2^30 queries per key head";
  return why_unaligned({args.q, args.k, args.v, args.out});
}

size_t workspace_bytes(const Top1ChunkForward& args) {
  return workspace_size<ForwardWorkspace>(args);
}
size_t workspace_bytes(const Top1ChunkBackward& bwd) {
  return workspace_size<BackwardWorkspace>(bwd);
}

void top1_chunk(const Top1ChunkForward& args, void* workspace, Stream stream) {
  check("top1_chunk", why_unsupported(args));
  const auto scratch = workspace_at<ForwardWorkspace>(workspace, args);
  if (scratch.select) select_chunks(args, *scratch.select, stream);
  const bool chosen = args.time > args.chunk_size;
  for (int rank = 0; rank == 0 || (rank < args.top_k && chosen); ++rank) {
    if (chosen) sort_queries(args, scratch.lists, rank, stream);
    attend(args, scratch.lists, /*own=*/rank == 0, chosen, scratch.finished, stream);
  }
}

void top1_chunk(const Top1ChunkBackward& bwd, void* workspace, Stream stream) {
  const Top1ChunkForward& args = bwd.forward;
  check("top1_chunk", why_unsupported(args));
  check("top1_chunk", why_unaligned({bwd.dout, bwd.dq, bwd.dk, bwd.dv}));
  const auto scratch = workspace_at<BackwardWorkspace>(workspace, bwd);
  const bool chosen = args.time > args.chunk_size;
  for (int rank = 0; rank == 0 || (rank < args.top_k && chosen); ++rank) {
    if (chosen) sort_queries(args, scratch.lists, rank, stream);
    chunk_gradients(bwd, scratch.gradients, scratch.lists, /*own=*/rank == 0, chosen, stream);
  }
}

}  // namespace assay::ops::cuda
