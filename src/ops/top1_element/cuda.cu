// Which calls the kernels take, and their steps.
#include "ops/cuda/attention.cuh"
#include "ops/top1_element/cuda_passes.cuh"

namespace assay::ops::cuda {
namespace {

using namespace element;

struct BackwardWorkspace {
  Operands operands;
  Choices choices;
  BackwardWorkspace(const Top1ElementBackward& bwd, WorkspaceArena& arena)
      : operands(bwd, arena), choices(bwd.forward, arena) {}
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
size_t workspace_bytes(const Top1ElementBackward& bwd) {
  return workspace_size<BackwardWorkspace>(bwd);
}

void top1_element(const Top1ElementForward& p, void* workspace, Stream stream) {
  check("top1_element", why_unsupported(p));
  const auto operands = workspace_at<Operands>(workspace, p);
  pack_operands(p, operands, stream);
  choose(p, operands, stream);
}

void top1_element(const Top1ElementBackward& bwd, void* workspace, Stream stream) {
  check("top1_element", why_unsupported(bwd.forward));
  check("top1_element", why_unaligned({bwd.dout, bwd.dq, bwd.dk, bwd.dv}));
  const auto scratch = workspace_at<BackwardWorkspace>(workspace, bwd);
  pack_operands(bwd, scratch.operands, stream);
  query_gradients(bwd, scratch.operands, stream);
  key_gradients(bwd, scratch.operands, stream);
  value_gradients(bwd, scratch.choices, stream);
}

}  // namespace assay::ops::cuda
