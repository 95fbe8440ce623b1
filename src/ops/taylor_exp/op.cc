// assay::taylor_exp_attention: checks and registration.
#include <torch/torch.h>

#include "ops/matrix_state/steps.h"
#include "ops/paths.h"
#include "ops/taylor_exp/taylor_exp.h"

namespace assay::ops {

namespace {
constexpr const char* kOp = "taylor_exp_attention";
}

std::tuple<at::Tensor, at::Tensor> taylor_exp_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                        double scale, bool normalize, double eps,
                                                        const OptionalTensor& initial_state) {
  const HeadShape shape = check_heads(kOp, "q", q, k, v);
  if (initial_state) {
    const int64_t features = 1 + shape.key_dim + shape.key_dim * (shape.key_dim + 1) / 2;
    check_shape(kOp, "initial_state", *initial_state, {shape.batch, shape.heads, features, shape.value_dim + 1},
                "[B, H, 1 + K + K(K+1)/2, V + 1]");
    check_like(kOp, "initial_state", *initial_state, q);
  }
  return taylor_exp_attention_reference(q, k, v, scale, normalize, eps, initial_state);
}

const bool registered_path = register_composed(kOp);
TORCH_LIBRARY_FRAGMENT(assay, m) {
  m.def(
      "taylor_exp_attention(Tensor q, Tensor k, Tensor v, float scale, bool normalize, float eps, "
      "Tensor? initial_state=None) -> (Tensor out, Tensor final_state)",
      taylor_exp_attention);
}

}  // namespace assay::ops
