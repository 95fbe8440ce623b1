#include <torch/torch.h>

#include "ops/attention/top1_chunk/top1_chunk.h"
#include "ops/core/paths.h"
#include "ops/core/register.h"
#include "ops/core/tensors.h"

namespace assay::ops {
namespace {

constexpr const char* kOp = "chunk_summaries";

// In bfloat16, means [B, chunks, Hk, 1, D] as what rounding leaves of them and the rounded ones.
at::Tensor in_parts(const at::Tensor& mean) {
  const at::Tensor low = mean - mean.to(at::kBFloat16);
  return at::cat({low, mean}, 3).to(at::kBFloat16);
}

}  // namespace

at::Tensor joined_summaries(const at::Tensor& parts) {
  const at::Tensor x = parts.to(at::kFloat);
  return x.slice(3, 0, 1) + x.slice(3, 1, 2);
}

at::Tensor chunk_summaries(const at::Tensor& k, int64_t chunk_size) {
  check_dims(kOp, "k", k, 4, "[B, S, Hk, D]");
  check_like(kOp, "k", k, "k", k);
  TORCH_CHECK_VALUE(chunk_size >= 1, kOp, ": chunk_size is ", chunk_size, ", expected 1 or more");
  const int64_t chunks = k.size(1) / chunk_size;
  if (k.is_meta()) {
    const bool parts = k.scalar_type() == at::kBFloat16;
    const auto dtype = parts ? at::kBFloat16 : real_dtype(sequence_dtype({k}));
    return at::empty({k.size(0), chunks, k.size(2), parts ? 2 : 1, k.size(3)},
                     k.options().dtype(dtype));
  }
  const at::NoGradGuard no_grad;
  const at::Tensor keys = k.slice(1, 0, chunks * chunk_size)
                              .to(real_dtype(sequence_dtype({k})))
                              .unflatten(1, {chunks, chunk_size})
                              .transpose(2, 3);  // [B, chunks, Hk, C, D]
  const at::Tensor mean = keys.mean(3, true);
  return k.scalar_type() == at::kBFloat16 ? in_parts(mean) : mean.contiguous();
}

constexpr const char* kComposed = "composed from tensor arithmetic";
const bool registered_path = register_paths(kOp, kComposed, kComposed);
TORCH_LIBRARY_FRAGMENT(assay, m) {
  register_operator(m, "chunk_summaries(Tensor k, int chunk_size) -> Tensor summaries",
                    "mean of the keys of each chunk, by which approx of top1_chunk chooses",
                    chunk_summaries);
}

}  // namespace assay::ops
