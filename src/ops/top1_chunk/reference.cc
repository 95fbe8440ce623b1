#include <torch/torch.h>

#include "ops/tensors.h"
#include "ops/top1_chunk/top1_chunk.h"

namespace assay::ops {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The top_k best of the chunks before the own one, [B, H, T, top_k]; logits [B, H, T, S], own [T, 1].
at::Tensor choose(const at::Tensor& q, const at::Tensor& k, const at::Tensor& logits, const at::Tensor& own,
                  int64_t chunk_size, bool exact, int64_t top_k) {
  const at::NoGradGuard no_grad;
  const int64_t chunks = k.size(2) / chunk_size;  // full ones
  const auto in_chunks = [&](const at::Tensor& x, int64_t dim) {
    return x.narrow(dim, 0, chunks * chunk_size).unflatten(dim, {chunks, chunk_size});
  };
  const at::Tensor score = exact ? in_chunks(logits, 3).logsumexp(-1) : q.matmul(in_chunks(k, 2).mean(3).mT());
  const at::Tensor candidates = score.masked_fill(at::arange(chunks, own.options()) >= own, -kInfinity);
  const at::Tensor ranked = std::get<1>(candidates.sort(/*stable=*/true, -1, /*descending=*/true)).slice(-1, 0, top_k);
  const at::Tensor padded = at::constant_pad_nd(ranked, {0, top_k - ranked.size(-1)}, -1);
  return padded.masked_fill(at::arange(top_k, own.options()) >= own, -1);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> top1_chunk_reference(const at::Tensor& q, const at::Tensor& k,
                                                                    const at::Tensor& v, int64_t chunk_size,
                                                                    double scale, std::string_view selection,
                                                                    int64_t top_k, const OptionalTensor& selected) {
  const auto real = real_dtype(sequence_dtype({q, k, v}));
  const int64_t time = q.size(1), size = k.size(1), group = q.size(2) / k.size(2);
  const auto heads_first = [&](const at::Tensor& x) { return x.to(real).transpose(1, 2); };
  const at::Tensor queries = heads_first(q), keys = heads_first(k).repeat_interleave(group, 1),
                   values = heads_first(v).repeat_interleave(group, 1);  // [B, H, ·, D]
  const at::Tensor positions = at::arange(size, q.options().dtype(at::kLong)),
                   chunk = positions.floor_divide(chunk_size);
  const at::Tensor t = positions.slice(0, size - time).unsqueeze(1), own = chunk.slice(0, size - time).unsqueeze(1);

  const at::Tensor logits = scale * queries.matmul(keys.mT());
  const at::Tensor remote = selected ? selected->masked_fill((*selected < 0) | (*selected >= own), -1)
                                     : choose(queries, keys, logits, own, chunk_size, selection == "exact", top_k);
  at::Tensor times_read = ((chunk == own) & (positions <= t)).to(at::kLong).expand_as(logits);
  for (const at::Tensor& slot : remote.unbind(-1)) times_read = times_read + (slot.unsqueeze(-1) == chunk);
  const at::Tensor read = at::where(times_read > 0, logits + times_read.to(real).log(), -kInfinity);
  const at::Tensor out = read.softmax(-1).matmul(values).transpose(1, 2).to(q.scalar_type());
  return {out, read.detach().logsumexp(-1), remote};
}

}  // namespace assay::ops
