#include <torch/torch.h>

#include "ops/attention/top1_chunk/top1_chunk.h"
#include "ops/core/register.h"
#include "ops/core/tensors.h"

namespace assay::ops {
namespace {

constexpr const char* kOp = "chunk_summaries";

// share of an axis that rounding may leave if the axis depends on those before it
constexpr double kTiny = 1e-6;

at::Tensor unit(const at::Tensor& x) { return x / x.norm(2, -1, true).clamp_min(1e-30); }

// Axes u_i [..., rank, D] with Σ u_i u_iᵀ ≤ A = xᵀx / C, equal to it on the span of `start`: a
// factor of A S (Sᵀ A S)⁻¹ Sᵀ A, a row of S at a time. x [..., C, D].
at::Tensor axes(const at::Tensor& x, const at::Tensor& start) {
  const double count = double(x.size(-2));
  const auto times_covariance = [&](const at::Tensor& s) {
    return s.matmul(x.mT()).matmul(x) / count;
  };
  const at::Tensor s = unit(times_covariance(start));
  const at::Tensor w = times_covariance(s);
  std::vector<at::Tensor> u;
  for (int64_t i = 0; i < start.size(-2); ++i) {
    const auto dot = [&](const at::Tensor& a) { return (a * s.select(-2, i)).sum(-1, true); };
    at::Tensor v = w.select(-2, i);
    const at::Tensor all = dot(v);
    for (const at::Tensor& before : u) v = v - dot(before) * before;
    const at::Tensor left = dot(v);
    u.push_back(at::where(left > kTiny * all, v * left.clamp_min(1e-30).rsqrt(), 0));
  }
  return at::stack(u, -2);
}

// In bfloat16, the mean as what rounding leaves of it and the rounded one. [B, chunks, Hk, 1
// + rank, D].
at::Tensor in_parts(const at::Tensor& summaries) {
  const at::Tensor mean = summaries.slice(3, 0, 1);
  const at::Tensor low = mean - mean.to(at::kBFloat16);
  return at::cat({low, summaries}, 3).to(at::kBFloat16);
}

}  // namespace

at::Tensor joined_summaries(const at::Tensor& parts) {
  const at::Tensor x = parts.to(at::kFloat);
  return at::cat({x.slice(3, 0, 1) + x.slice(3, 1, 2), x.slice(3, 2)}, 3);
}

at::Tensor chunk_summaries(const at::Tensor& k, int64_t chunk_size, int64_t rank) {
  check_dims(kOp, "k", k, 4, "[B, S, Hk, D]");
  check_like(kOp, "k", k, "k", k);
  TORCH_CHECK_VALUE(chunk_size >= 1, kOp, ": chunk_size is ", chunk_size, ", expected 1 or more");
  TORCH_CHECK_VALUE(rank >= 0 && rank <= kLargestRank, kOp, ": rank is ", rank, ", expected 0 to ",
                    kLargestRank);
  const int64_t chunks = k.size(1) / chunk_size;
  if (k.is_meta()) {
    const bool parts = k.scalar_type() == at::kBFloat16;
    const auto dtype = parts ? at::kBFloat16 : real_dtype(sequence_dtype({k}));
    return at::empty({k.size(0), chunks, k.size(2), (parts ? 2 : 1) + rank, k.size(3)},
                     k.options().dtype(dtype));
  }
  const at::NoGradGuard no_grad;
  const at::Tensor keys = k.slice(1, 0, chunks * chunk_size)
                              .to(real_dtype(sequence_dtype({k})))
                              .unflatten(1, {chunks, chunk_size})
                              .transpose(2, 3);  // [B, chunks, Hk, C, D]
  at::Tensor out = keys.mean(3, true);
  if (chunks == 0) out = out.expand({-1, -1, -1, 1 + rank, -1});
  else if (rank > 0) {
    const at::Tensor x = keys - out;
    const at::Tensor at =
        (at::arange(rank, k.options().dtype(at::kLong)) * chunk_size).floor_divide(rank);
    out = at::cat({out, axes(x, x.index_select(3, at))}, 3);
  }
  return k.scalar_type() == at::kBFloat16 ? in_parts(out) : out.contiguous();
}

TORCH_LIBRARY_FRAGMENT(assay, m) {
  register_operator(m, "chunk_summaries(Tensor k, int chunk_size, int rank=0) -> Tensor summaries",
                    "mean and low-rank covariance of the keys of each chunk, "
                    "which top1_chunk's shortlist reads",
                    chunk_summaries);
}

}  // namespace assay::ops
