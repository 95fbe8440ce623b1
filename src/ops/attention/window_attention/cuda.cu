// Which calls the kernels take; they are those of ops/cuda/attention_passes.cuh.
#include "ops/attention/passes/attention_passes.cuh"
#include "ops/attention/window_attention/kernel.h"
#include "ops/cuda/attention.cuh"

namespace assay::ops::cuda {
namespace {

Attention attention_of(const WindowAttentionForward& args) {
  return {args.batch,
          args.time,
          args.keys,
          args.heads,
          args.kv_heads,
          args.head_dim,
          args.window,
          args.scale,
          args.q,
          args.k,
          args.v,
          static_cast<const float*>(args.alibi_slopes),
          static_cast<const float*>(args.decay_sums)};
}

}  // namespace

const char* why_unsupported(const WindowAttentionForward& args) {
  if (args.dtype != DType::bf16) return "takes bfloat16 only";
  if (const char* why_not = why_unsupported(attention_of(args))) return why_not;
  return why_unaligned({args.out});
}

size_t workspace_bytes(const WindowAttentionForward& args) {
  return workspace_size<AttentionWorkspace>(attention_of(args), false);
}
size_t workspace_bytes(const WindowAttentionBackward& bwd) {
  return workspace_size<AttentionWorkspace>(attention_of(bwd.forward), true);
}

void window_attention(const WindowAttentionForward& args, void* workspace, Stream stream) {
  check("window_attention", why_unsupported(args));
  const Attention a = attention_of(args);
  attention_forward(a, {args.out, static_cast<float*>(args.logsumexp)},
                    workspace_at<AttentionWorkspace>(workspace, a, false), stream);
}

void window_attention(const WindowAttentionBackward& bwd, void* workspace, Stream stream) {
  const WindowAttentionForward& args = bwd.forward;
  check("window_attention", why_unsupported(args));
  check("window_attention", why_unaligned({bwd.dout, bwd.dq, bwd.dk, bwd.dv}));
  check("window_attention", bwd.dalibi_slopes ? "makes no gradient of ALiBi's slopes" : nullptr);
  const Attention a = attention_of(args);
  attention_backward(a,
                     {bwd.dout, static_cast<const float*>(args.logsumexp), args.out, nullptr,
                      bwd.dq, bwd.dk, bwd.dv, static_cast<float*>(bwd.ddecay_sums)},
                     workspace_at<AttentionWorkspace>(workspace, a, true), stream);
}

}  // namespace assay::ops::cuda
