#include <torch/torch.h>

#include "ops/attention/top1_chunk/top1_chunk.h"
#include "ops/core/tensors.h"

namespace assay::ops {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

constexpr int64_t kScores = 1 << 26;  // that top1_chunk_choice() has at a time

// [B, ·, Hk, D] → [B, H, ·, D]
at::Tensor heads_first(const at::Tensor& x, at::ScalarType dtype, int64_t group) {
  const at::Tensor all = x.to(dtype).transpose(1, 2);
  return group == 1 ? all : all.repeat_interleave(group, 1);
}
// The means of the full chunks, [B, H, chunks, D].
at::Tensor means(const at::Tensor& k, const OptionalTensor& summaries, int64_t chunk_size,
                 at::ScalarType dtype, int64_t group) {
  const at::Tensor kept = summaries ? *summaries : chunk_summaries(k, chunk_size);
  const at::Tensor all = k.scalar_type() == at::kBFloat16 ? joined_summaries(kept) : kept;
  return heads_first(all.select(3, 0).slice(1, 0, k.size(1) / chunk_size), dtype, group);
}

// Scores of the full chunks, [B, H, T, chunks], from logits [B, H, T, S].
at::Tensor exact_scores(const at::Tensor& logits, int64_t chunk_size) {
  const int64_t chunks = logits.size(3) / chunk_size;
  return logits.narrow(3, 0, chunks * chunk_size).unflatten(3, {chunks, chunk_size}).logsumexp(-1);
}

// The top_k best of the chunks before the own one [T, 1], by their scores: [B, H, T, top_k].
at::Tensor best(const at::Tensor& score, const at::Tensor& own, int64_t top_k) {
  const at::Tensor candidates =
      score.masked_fill(at::arange(score.size(-1), own.options()) >= own, -kInfinity);
  const at::Tensor found =
      top_k == 1 && score.size(-1) > 0
          ? candidates.argmax(-1, /*keepdim=*/true)  // the first of equal ones
          : std::get<1>(candidates.sort(/*stable=*/true, -1, /*descending=*/true));
  const at::Tensor chosen = found.slice(-1, 0, top_k);
  const at::Tensor padded = at::constant_pad_nd(chosen, {0, top_k - chosen.size(-1)}, -1);
  return padded.masked_fill(at::arange(top_k, own.options()) >= own, -1);
}

}  // namespace

at::Tensor top1_chunk_choice(const at::Tensor& q, const at::Tensor& k, int64_t chunk_size,
                             double scale, std::string_view selection, int64_t top_k,
                             const OptionalTensor& summaries) {
  const at::NoGradGuard no_grad;
  const auto real = real_dtype(sequence_dtype({q, k}));
  const int64_t group = q.size(2) / k.size(2);
  const bool exact = selection == "exact";
  const at::Tensor scored =
      exact ? heads_first(k, real, group) : means(k, summaries, chunk_size, real, group);
  const int64_t columns = q.size(0) * q.size(2) * std::max<int64_t>(scored.size(2), 1);
  int64_t position = k.size(1) - q.size(1);
  std::vector<at::Tensor> chosen;
  for (const at::Tensor& some : q.split(std::max<int64_t>(kScores / columns, 1), 1)) {
    const at::Tensor t =
        at::arange(position, position + some.size(1), q.options().dtype(at::kLong));
    position += some.size(1);
    const int64_t candidates = (position - 1) / chunk_size;
    const at::Tensor read = scored.narrow(2, 0, exact ? candidates * chunk_size : candidates);
    const at::Tensor product = heads_first(some, real, 1).matmul(read.mT());
    const at::Tensor score = exact ? exact_scores(scale * product, chunk_size) : product;
    chosen.push_back(best(score, t.floor_divide(chunk_size).unsqueeze(1), top_k));
  }
  return at::cat(chosen, 2);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> top1_chunk_reference(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t chunk_size, double scale,
    std::string_view selection, int64_t top_k, const OptionalTensor& selected,
    const OptionalTensor& summaries) {
  const auto real = real_dtype(sequence_dtype({q, k, v}));
  const int64_t time = q.size(1);
  const int64_t size = k.size(1);
  const int64_t group = q.size(2) / k.size(2);
  // [B, H, ·, D]
  const at::Tensor queries = heads_first(q, real, 1);
  const at::Tensor keys = heads_first(k, real, group);
  const at::Tensor values = heads_first(v, real, group);
  const at::Tensor positions = at::arange(size, q.options().dtype(at::kLong));
  const at::Tensor chunk = positions.floor_divide(chunk_size);
  const at::Tensor t = positions.slice(0, size - time).unsqueeze(1);
  const at::Tensor own = chunk.slice(0, size - time).unsqueeze(1);

  const at::Tensor logits = scale * queries.matmul(keys.mT());
  const auto chosen = [&] {
    const at::NoGradGuard no_grad;
    const at::Tensor score =
        selection == "exact" ? exact_scores(logits, chunk_size)
                             : queries.matmul(means(k, summaries, chunk_size, real, group).mT());
    return best(score, own, top_k);
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
