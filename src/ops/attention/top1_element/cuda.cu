// Which calls the kernels take, and their steps.
#include "ops/attention/passes/attention_passes.cuh"
#include "ops/attention/top1_element/cuda_passes.cuh"
#include "ops/cuda/attention.cuh"

namespace assay::ops::cuda {
namespace {

using namespace element;

Attention attention_of(const Top1ElementForward& p) {
  const int64_t keys = p.past + p.time;
  return {p.batch, p.time, keys, p.heads, p.kv_heads, p.head_dim, keys, p.scale, p.q, p.k, p.v};
}

struct BackwardWorkspace {
  AttentionWorkspace attention;
  Choices choices;
  BackwardWorkspace(const Top1ElementBackward& bwd, WorkspaceArena& arena)
      : attention(attention_of(bwd.forward), true, arena), choices(bwd.forward, arena) {}
};

}  // namespace

const char* why_unsupported(const Top1ElementForward& p) {
  if (p.dtype != DType::bf16) return "takes bfloat16 only";
  if (const char* why_not = why_unsupported(attention_of(p))) return why_not;
  return why_unaligned({p.out});
}

size_t workspace_bytes(const Top1ElementForward& p) {
  return workspace_size<AttentionWorkspace>(attention_of(p), false);
}
size_t workspace_bytes(const Top1ElementBackward& bwd) {
  return workspace_size<BackwardWorkspace>(bwd);
}

void top1_element(const Top1ElementForward& p, void* workspace, Stream stream) {
  check("top1_element", why_unsupported(p));
  const Attention a = attention_of(p);
  attention_forward(a,
                    {p.out, static_cast<float*>(p.logsumexp), p.index, static_cast<float*>(p.soft)},
                    workspace_at<AttentionWorkspace>(workspace, a, false), stream);
}

void top1_element(const Top1ElementBackward& bwd, void* workspace, Stream stream) {
  const Top1ElementForward& p = bwd.forward;
  check("top1_element", why_unsupported(p));
  check("top1_element", why_unaligned({bwd.dout, bwd.dq, bwd.dk, bwd.dv}));
  const auto scratch = workspace_at<BackwardWorkspace>(workspace, bwd);
  attention_backward(attention_of(p),
                     {bwd.dout,
                      static_cast<const float*>(p.logsumexp),
                      {},
                      static_cast<const float*>(p.soft),
                      bwd.dq,
                      bwd.dk,
                      {}},
                     scratch.attention, stream);
  value_gradients(bwd, scratch.choices, stream);
}

}  // namespace assay::ops::cuda
