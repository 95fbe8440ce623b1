#include "ops/attention/top1_element/flash.h"

#include <torch/torch.h>

#include "ops/attention/passes/choice.h"
#include "ops/attention/top1_element/kernel.h"
#include "ops/core/dispatch.h"
#include "ops/core/split.h"
#include "ops/core/tensors.h"

namespace assay::ops {
namespace {

// The sizes of a call as a Top1Choice or a Top1ElementForward.
template <class Call>
Call sizes_of(const at::Tensor& q, const at::Tensor& k) {
  Call call{};
  call.batch = q.size(0);
  call.time = q.size(1);
  call.past = k.size(1) - call.time;
  call.heads = q.size(2);
  call.kv_heads = k.size(2);
  call.head_dim = q.size(3);
  return call;
}
Top1Choice describe(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  auto c = sizes_of<Top1Choice>(q, k);
  c.scale = scale;
  c.q = view(q);
  c.k = view(k);
  c.v = view(v);
  return c;
}

template <class OnCuda>
void launch(const at::Device& device, OnCuda&& on_cuda) {
  dispatch(
      device, [](const auto&) { fail("top1_element: FlashAttention-2 needs a GPU"); }, on_cuda);
}

}  // namespace

const char* why_no_flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  if (!on_gpu(q.device())) return "takes GPUs of compute capability 8.0 or more";
  if (q.scalar_type() != at::kBFloat16) return "takes bfloat16 only";
  if constexpr (kCudaKernels) return cuda::why_unsupported(describe(q, k, v, 1));
  return "was not built";
}

Top1ElementOutputs top1_element_flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      double scale, bool with_gradient) {
  Top1ElementOutputs o{at::empty(q.sizes(), q.options()),
                       at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kLong)),
                       {},
                       {}};
  Top1Choice c = describe(q, k, v, scale);
  c.index = static_cast<int64_t*>(data(o.index));
  c.out = view(o.out);
  launch(q.device(), [&](auto stream) { cuda::choose(c, stream); });
  if (with_gradient) {
    const auto softmax = at::_flash_attention_forward_symint(q, k, v, {}, {}, c.time, k.size(1),
                                                             0.0, /*is_causal=*/true,
                                                             /*return_debug_mask=*/false, scale);
    o.soft = std::get<0>(softmax);
    o.logsumexp = std::get<1>(softmax);
  }
  return o;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> top1_element_flash_backward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
    const Top1ElementOutputs& outputs, const at::Tensor& dout) {
  const at::Tensor no_dropout = at::empty({2}, q.options().dtype(at::kUInt64));
  const auto softmax = at::_flash_attention_backward_symint(
      dout, q, k, v, outputs.soft, outputs.logsumexp, {}, {}, q.size(1), k.size(1), 0.0,
      /*is_causal=*/true, no_dropout, no_dropout, scale);
  const at::Tensor dv = gradient_memory(v);
  Top1ElementBackward work{.forward = sizes_of<Top1ElementForward>(q, k)};
  work.forward.index = static_cast<int64_t*>(data(outputs.index));
  work.dout = view(dout);
  work.dv = view(dv);
  launch(q.device(), [&](auto stream) {
    const at::Tensor scratch = workspace(cuda::value_gradient_bytes(work), q.device());
    cuda::value_gradients(work, data(scratch), stream);
  });
  return {std::get<0>(softmax), std::get<1>(softmax), dv};
}

}  // namespace assay::ops
