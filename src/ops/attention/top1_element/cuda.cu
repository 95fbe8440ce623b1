// Which calls the kernels take, and their steps.
#include "ops/attention/passes/attention_passes.cuh"
#include "ops/attention/top1_element/cuda_passes.cuh"
#include "ops/cuda/attention.cuh"

namespace assay::ops::cuda {
namespace {

using namespace element;

Attention attention_of(const Top1ElementForward& args) {
  const int64_t keys = args.past + args.time;
  return {args.batch, args.time,  keys,   args.heads, args.kv_heads, args.head_dim,
          keys,       args.scale, args.q, args.k,     args.v};
}

struct BackwardWorkspace {
  AttentionWorkspace attention;
  Choices choices;
  BackwardWorkspace(const Top1ElementBackward& bwd, WorkspaceArena& arena)
      : attention(attention_of(bwd.forward), true, arena), choices(bwd.forward, arena) {}
};

}  // namespace

const char* why_unsupported(const Top1ElementForward& args) {
  if (args.dtype != DType::bf16) return "takes bfloat16 only";
  if (const char* why_not = why_unsupported(attention_of(args))) return why_not;
  return why_unaligned({args.out});
}

size_t workspace_bytes(const Top1ElementForward& args) {
  return workspace_size<AttentionWorkspace>(attention_of(args), false);
}
size_t workspace_bytes(const Top1ElementBackward& bwd) {
  return workspace_size<BackwardWorkspace>(bwd);
}

void top1_element(const Top1ElementForward& args, void* workspace, Stream stream) {
  check("top1_element", why_unsupported(args));
  const Attention a = attention_of(args);
  attention_forward(
      a,
      {args.out, static_cast<float*>(args.logsumexp), args.index, static_cast<float*>(args.soft)},
      workspace_at<AttentionWorkspace>(workspace, a, false), stream);
}

void top1_element(const Top1ElementBackward& bwd, void* workspace, Stream stream) {
  const Top1ElementForward& args = bwd.forward;
  check("top1_element", why_unsupported(args));
  check("top1_element", why_unaligned({bwd.dout, bwd.dq, bwd.dk, bwd.dv}));
  const auto scratch = workspace_at<BackwardWorkspace>(workspace, bwd);
  attention_backward(attention_of(args),
                     {bwd.dout,
                      static_cast<const float*>(args.logsumexp),
                      {},
                      static_cast<const float*>(args.soft),
                      bwd.dq,
                      bwd.dk,
                      {}},
                     scratch.attention, stream);
  value_gradients(bwd, scratch.choices, stream);
}

}  // namespace assay::ops::cuda
