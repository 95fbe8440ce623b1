#include <torch/torch.h>

#include "ops/glu/glu.h"

namespace assay::ops {

at::Tensor glu_reference(const at::Tensor& h, std::string_view activation) {
  const auto parts = h.chunk(2, -1);
  return (activation == "silu" ? at::silu(parts[0]) : at::gelu(parts[0], "tanh")) * parts[1];
}

}  // namespace assay::ops
