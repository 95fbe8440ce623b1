#include <torch/torch.h>

#include "ops/attention/top1_chunk/top1_chunk.h"
#include "ops/core/tensors.h"

namespace assay::ops {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The parameters of the choice, in addition to the queries and keys [B, H, ·, D].
struct Choice {
  std::string_view selection;
  int64_t chunk_size;
  int64_t top_k;
};

// Scores of the full chunks, [B, H, T, chunks], from logits [B, H, T, S].
at::Tensor exact_scores(const at::Tensor& logits, const Choice& c) {
  const int64_t chunks = logits.size(3) / c.chunk_size;
  return logits.narrow(3, 0, chunks * c.chunk_size)
      .unflatten(3, {chunks, c.chunk_size})
      .logsumexp(-1);
}

// The top_k best of the chunks before the own one [T, 1], [B, H, T, top_k]. summaries
// [B, H, chunks, 1, D].
at::Tensor choose(const at::Tensor& q, const at::Tensor& summaries, const at::Tensor& logits,
                  const at::Tensor& own, const Choice& c) {
  const at::NoGradGuard no_grad;
  const at::Tensor score =
      c.selection == "approx" ? q.matmul(summaries.select(3, 0).mT()) : exact_scores(logits, c);
  const at::Tensor candidates =
      score.masked_fill(at::arange(score.size(-1), own.options()) >= own, -kInfinity);
  const at::Tensor best =
      std::get<1>(candidates.sort(/*stable=*/true, -1, /*descending=*/true)).slice(-1, 0, c.top_k);
  const at::Tensor padded = at::constant_pad_nd(best, {0, c.top_k - best.size(-1)}, -1);
  return padded.masked_fill(at::arange(c.top_k, own.options()) >= own, -1);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> top1_chunk_reference(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t chunk_size, double scale,
    std::string_view selection, int64_t top_k, const OptionalTensor& selected,
    const OptionalTensor& summaries) {
  const auto real = real_dtype(sequence_dtype({q, k, v}));
  const int64_t time = q.size(1);
  const int64_t size = k.size(1);
  const int64_t group = q.size(2) / k.size(2);
  const auto heads_first = [&](const at::Tensor& x) { return x.to(real).transpose(1, 2); };
  // [B, H, ·, D]
  const at::Tensor queries = heads_first(q);
  const at::Tensor keys = heads_first(k).repeat_interleave(group, 1);
  const at::Tensor values = heads_first(v).repeat_interleave(group, 1);
  const at::Tensor positions = at::arange(size, q.options().dtype(at::kLong));
  const at::Tensor chunk = positions.floor_divide(chunk_size);
  const at::Tensor t = positions.slice(0, size - time).unsqueeze(1);
  const at::Tensor own = chunk.slice(0, size - time).unsqueeze(1);

  const at::Tensor logits = scale * queries.matmul(keys.mT());
  const Choice choice{selection, chunk_size, top_k};
  const auto chosen = [&] {
    if (selection == "exact") return choose(queries, {}, logits, own, choice);
    const at::Tensor kept = summaries ? *summaries : chunk_summaries(k, chunk_size);
    const at::Tensor all = k.scalar_type() == at::kBFloat16 ? joined_summaries(kept) : kept;
    return choose(
        queries,
        all.to(real).slice(1, 0, size / chunk_size).transpose(1, 2).repeat_interleave(group, 1),
        logits, own, choice);
  };
  const at::Tensor remote =
      selected ? selected->masked_fill((*selected < 0) | (*selected >= own), -1) : chosen();
  at::Tensor times_read = ((chunk == own) & (positions <= t)).to(at::kLong).expand_as(logits);
  for (const at::Tensor& slot : remote.unbind(-1))
    times_read = times_read + (slot.unsqueeze(-1) == chunk);
  const at::Tensor read = at::where(times_read > 0, logits + times_read.to(real).log(), -kInfinity);
  const at::Tensor out = read.softmax(-1).matmul(values).transpose(1, 2).to(q.scalar_type());
  return {out, read.detach().logsumexp(-1), remote};
}

}  // namespace assay::ops
