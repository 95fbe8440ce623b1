// Which calls the kernels take, and their steps.
#include "ops/cuda/attention.cuh"
#include "ops/top1_element/cuda_passes.cuh"

namespace assay::ops::cuda {
namespace {

using namespace element;

struct BackwardScratch {
  Operands operands;
  Choices choices;
  BackwardScratch(const Top1ElementBackward& q, WorkspaceArena& arena)
      : operands(q, arena), choices(q.forward, arena) {}
};

}  // namespace

const char* why_unsupported(const Top1ElementForward& p) {
  if (p.dtype != DType::bf16) return "takes bfloat16 only";
  if (const char* why_not = why_not_head_dim(p.head_dim)) return why_not;
  if (p.batch * p.heads * (p.past + p.time) >= int64_t{1} << 31)
    return "takes fewer than 2^31 rows of all heads";
  if (p.batch * p.heads >= 1 << 16) return "takes fewer than 2^16 heads of the batch";
  return why_unaligned({p.q, p.k, p.v, p.out});
}

size_t workspace_bytes(const Top1ElementForward& p) { return workspace_size<Operands>(p); }
size_t workspace_bytes(const Top1ElementBackward& q) { return workspace_size<BackwardScratch>(q); }

void top1_element(const Top1ElementForward& p, void* workspace, Stream raw_stream) {
  check("top1_element", why_unsupported(p));
  const auto stream = cuda_stream(raw_stream);
  WorkspaceArena arena(workspace);
  const Operands operands(p, arena);
  pack_operands(p, operands, stream);
  choose(p, operands, stream);
}

void top1_element(const Top1ElementBackward& q, void* workspace, Stream raw_stream) {
  check("top1_element", why_unsupported(q.forward));
  check("top1_element", why_unaligned({q.dout, q.dq, q.dk, q.dv}));
  const auto stream = cuda_stream(raw_stream);
  WorkspaceArena arena(workspace);
  const BackwardScratch scratch(q, arena);
  pack_operands(q, scratch.operands, stream);
  query_gradients(q, scratch.operands, stream);
  key_gradients(q, scratch.operands, stream);
  value_gradients(q, scratch.choices, stream);
}

}  // namespace assay::ops::cuda
