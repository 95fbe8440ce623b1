// Which calls the kernels take; they are those of ops/cuda/attention_passes.cuh.
#include "ops/attention/passes/attention_passes.cuh"
#include "ops/attention/window_attention/kernel.h"
#include "ops/cuda/attention.cuh"

namespace assay::ops::cuda {
namespace {

Attention attention_of(const WindowAttentionForward& p) {
  return {p.batch,    p.time,     p.keys,   p.heads,
          p.kv_heads, p.head_dim, p.window, p.scale,
          p.q,        p.k,        p.v,      static_cast<const float*>(p.alibi_slopes)};
}

}  // namespace

const char* why_unsupported(const WindowAttentionForward& p) {
  if (p.dtype != DType::bf16) return "takes bfloat16 only";
  if (const char* why_not = why_unsupported(attention_of(p))) return why_not;
  return why_unaligned({p.out});
}

size_t workspace_bytes(const WindowAttentionForward& p) {
  return workspace_size<AttentionWorkspace>(attention_of(p), false);
}
size_t workspace_bytes(const WindowAttentionBackward& bwd) {
  return workspace_size<AttentionWorkspace>(attention_of(bwd.forward), true);
}

void window_attention(const WindowAttentionForward& p, void* workspace, Stream stream) {
  check("window_attention", why_unsupported(p));
  const Attention a = attention_of(p);
  attention_forward(a, {p.out, static_cast<float*>(p.logsumexp)},
                    workspace_at<AttentionWorkspace>(workspace, a, false), stream);
}

void window_attention(const WindowAttentionBackward& bwd, void* workspace, Stream stream) {
  const WindowAttentionForward& p = bwd.forward;
  check("window_attention", why_unsupported(p));
  check("window_attention", why_unaligned({bwd.dout, bwd.dq, bwd.dk, bwd.dv}));
  check("window_attention", bwd.dalibi_slopes ? "makes no gradient of ALiBi's slopes" : nullptr);
  const Attention a = attention_of(p);
  attention_backward(
      a, {bwd.dout, static_cast<const float*>(p.logsumexp), p.out, nullptr, bwd.dq, bwd.dk, bwd.dv},
      workspace_at<AttentionWorkspace>(workspace, a, true), stream);
}

}  // namespace assay::ops::cuda
