#include "ops/attention/top1_element/composed.h"

#include <torch/torch.h>

#include "ops/core/tensors.h"

namespace assay::ops {
namespace {

constexpr int64_t kBlock = 128;  // queries whose scores are held at a time

at::Tensor heads_first(const at::Tensor& x, int64_t copies) {  // [B, ·, Hk, D] → [B, H, ·, D], real
  return x.transpose(1, 2).to(real_dtype(x.scalar_type())).repeat_interleave(copies, 1);
}

// The queries, keys and values [B, H, ·, D] of one call, block by block.
struct Heads {
  Heads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale)
      : group(q.size(2) / k.size(2)),
        time(q.size(1)),
        past(k.size(1) - time),
        scale(scale),
        q(heads_first(q, 1)),
        k(heads_first(k, group)),
        v(heads_first(v, group)) {}
  int64_t group;
  int64_t time;
  int64_t past;
  double scale;
  at::Tensor q;
  at::Tensor k;
  at::Tensor v;

  // keys that the block's last query sees
  int64_t seen(int64_t begin) const { return past + end(begin); }
  int64_t end(int64_t begin) const { return std::min(begin + kBlock, time); }
  at::Tensor logits(int64_t begin) const {
    const at::Tensor all =
        scale * q.slice(2, begin, end(begin)).matmul(k.slice(2, 0, seen(begin)).mT());
    const at::Tensor later =
        at::ones({all.size(2), all.size(3)}, all.options().dtype(at::kBool)).triu(past + begin + 1);
    return all.masked_fill_(later, -std::numeric_limits<double>::infinity());
  }
  at::Tensor sum_of_group(const at::Tensor& gradient) const {  // [B, H, S, D] → [B, S, Hk, D]
    return gradient.unflatten(1, {-1, group}).sum(2).transpose(1, 2);
  }
};

}  // namespace

Top1ElementOutputs top1_element_composed(const at::Tensor& q, const at::Tensor& k,
                                         const at::Tensor& v, double scale, bool with_gradient) {
  const Heads heads(q, k, v, scale);
  std::vector<at::Tensor> index;
  std::vector<at::Tensor> logsumexp;
  std::vector<at::Tensor> soft;
  for (int64_t begin = 0; begin < heads.time; begin += kBlock) {
    const at::Tensor logits = heads.logits(begin);
    index.push_back(logits.argmax(-1));
    logsumexp.push_back(logits.logsumexp(-1));
    if (with_gradient)
      soft.push_back(logits.softmax(-1).matmul(heads.v.slice(2, 0, heads.seen(begin))));
  }
  Top1ElementOutputs o{{},
                       at::cat(index, 2),
                       at::cat(logsumexp, 2),
                       with_gradient ? at::cat(soft, 2) : at::Tensor()};
  const at::Tensor out = heads.v.gather(2, o.index.unsqueeze(-1).expand_as(heads.q));
  o.out = out.masked_fill(o.logsumexp.isnan().unsqueeze(-1), std::nan(""))
              .transpose(1, 2)
              .to(q.scalar_type());
  return o;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> top1_element_composed_backward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
    const Top1ElementOutputs& outputs, const at::Tensor& dout) {
  const Heads heads(q, k, v, scale);
  const at::Tensor dO = heads_first(dout, 1);
  const at::Tensor delta = (dO * outputs.soft).sum(-1, true);
  const at::Tensor dq = at::empty_like(heads.q);
  const at::Tensor dk = at::zeros_like(heads.k);
  const at::Tensor dv = at::zeros_like(heads.v);
  for (int64_t begin = 0; begin < heads.time; begin += kBlock) {
    const int64_t end = heads.end(begin);
    const int64_t seen = heads.seen(begin);
    const auto block = [&](const at::Tensor& x) { return x.slice(2, begin, end); };
    const auto keys = [&](const at::Tensor& x) { return x.slice(2, 0, seen); };
    const at::Tensor p = (heads.logits(begin) - block(outputs.logsumexp).unsqueeze(-1)).exp_();
    const at::Tensor dS = p * (block(dO).matmul(keys(heads.v).mT()) - block(delta)) * scale;
    block(dq).copy_(dS.matmul(keys(heads.k)));
    keys(dk).add_(dS.mT().matmul(block(heads.q)));
    const at::Tensor chosen =
        at::arange(seen, outputs.index.options()) == block(outputs.index).unsqueeze(-1);
    keys(dv).add_(chosen.to(dO.scalar_type()).mT().matmul(block(dO)));
  }
  const auto dtype = q.scalar_type();
  return {dq.transpose(1, 2).to(dtype), heads.sum_of_group(dk).to(dtype),
          heads.sum_of_group(dv).to(dtype)};
}

}  // namespace assay::ops
