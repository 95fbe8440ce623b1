// assay::top1_element: checks, casts, and the autograd function around the kernels.
#include <torch/torch.h>

#include "ops/paths.h"
#include "ops/tensors.h"
#include "ops/top1_element/top1_element.h"

namespace assay::ops {
namespace {

constexpr const char* kOp = "top1_element";

void check(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  check_attention(kOp, q, k, v);
  TORCH_CHECK_VALUE(std::isfinite(scale), kOp, ": scale is ", scale, ", expected a finite number");
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> top1_element(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                double scale) {
  check(q, k, v, scale);
  return top1_element_reference(q, k, v, scale);
}

const bool registered_path = register_composed(kOp);
TORCH_LIBRARY_FRAGMENT(assay, m) {
  m.def("top1_element(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor out, Tensor index)", top1_element);
}

}  // namespace assay::ops
