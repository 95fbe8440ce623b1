// assay::top1_chunk: checks, casts, and the autograd function around the kernels.
#include <torch/torch.h>

#include "ops/paths.h"
#include "ops/tensors.h"
#include "ops/top1_chunk/top1_chunk.h"

namespace assay::ops {
namespace {

constexpr const char* kOp = "top1_chunk";

void check(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t chunk_size, double scale,
           std::string_view selection, int64_t top_k, const OptionalTensor& selected) {
  check_attention(kOp, q, k, v);
  TORCH_CHECK_VALUE(chunk_size >= 1, kOp, ": chunk_size is ", chunk_size, ", expected 1 or more");
  TORCH_CHECK_VALUE(std::isfinite(scale), kOp, ": scale is ", scale, ", expected a finite number");
  TORCH_CHECK_VALUE(selection != "shortlist", kOp,
                    ": selection 'shortlist' is not offered; there are 'exact', 'approx'");
  TORCH_CHECK_VALUE(selection == "exact" || selection == "approx", kOp, ": selection is '", selection,
                    "', expected 'exact' or 'approx'");
  TORCH_CHECK_VALUE(top_k >= 1, kOp, ": top_k is ", top_k, ", expected 1 or more");
  if (!selected) return;
  check_shape(kOp, "selected", *selected, {q.size(0), q.size(2), q.size(1), top_k}, "[B, H, T, top_k]");
  TORCH_CHECK_VALUE(selected->scalar_type() == at::kLong && selected->device() == q.device(), kOp, ": selected holds ",
                    selected->scalar_type(), " on ", selected->device(), ", expected Long on ", q.device());
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> top1_chunk(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                          int64_t chunk_size, double scale, std::string_view selection,
                                                          int64_t top_k, const OptionalTensor& selected) {
  check(q, k, v, chunk_size, scale, selection, top_k, selected);
  return top1_chunk_reference(q, k, v, chunk_size, scale, selection, top_k, selected);
}

const bool registered_path = register_composed(kOp);
TORCH_LIBRARY_FRAGMENT(assay, m) {
  m.def(
      "top1_chunk(Tensor q, Tensor k, Tensor v, int chunk_size, float scale, str selection='exact', int top_k=1, "
      "Tensor? selected=None) -> (Tensor out, Tensor logsumexp, Tensor selected)",
      top1_chunk);
}

}  // namespace assay::ops
