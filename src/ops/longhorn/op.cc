// assay::longhorn: checks and registration.
#include <torch/torch.h>

#include "ops/longhorn/longhorn.h"
#include "ops/paths.h"
#include "ops/tensors.h"

namespace assay::ops {
namespace {

constexpr const char* kOp = "longhorn";

void check(const at::Tensor& x, const at::Tensor& dt, const at::Tensor& k, const at::Tensor& q, const OptionalTensor& D,
           const OptionalTensor& z, const OptionalTensor& dt_bias, const OptionalTensor& initial_state) {
  check_dims(kOp, "x", x, 3, "[B, T, Dm]");
  check_dims(kOp, "dt", dt, 3, "[B, T, Dm] or [B, T, 1]");
  check_dims(kOp, "k", k, 3, "[B, T, N]");
  const int64_t batch = x.size(0), time = x.size(1), channels = x.size(2), N = k.size(2);
  const int64_t rates = dt.size(2) == 1 ? 1 : channels;
  check_shape(kOp, "dt", dt, {batch, time, rates}, "[B, T, Dm] or [B, T, 1]");
  check_shape(kOp, "k", k, {batch, time, N}, "[B, T, N]");
  check_shape(kOp, "q", q, k.sizes(), "[B, T, N]");
  if (D) check_shape(kOp, "D", *D, {channels}, "[Dm]");
  if (z) check_shape(kOp, "z", *z, x.sizes(), "[B, T, Dm]");
  if (dt_bias) check_shape(kOp, "dt_bias", *dt_bias, {rates}, "[channels of dt]");
  if (initial_state) check_shape(kOp, "initial_state", *initial_state, {batch, channels, N}, "[B, Dm, N]");
  for (const auto& [name, tensor] : {std::pair("x", x), {"dt", dt}, {"k", k}, {"q", q}})
    check_like(kOp, name, tensor, x);
  for (const auto& [name, tensor] :
       {std::pair("D", &D), {"z", &z}, {"dt_bias", &dt_bias}, {"initial_state", &initial_state}})
    if (*tensor) check_like(kOp, name, **tensor, x);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> longhorn(const at::Tensor& x, const at::Tensor& dt, const at::Tensor& k,
                                            const at::Tensor& q, const OptionalTensor& D, const OptionalTensor& z,
                                            const OptionalTensor& dt_bias, bool exact,
                                            const OptionalTensor& initial_state) {
  check(x, dt, k, q, D, z, dt_bias, initial_state);
  return longhorn_reference(x, dt, k, q, D, z, dt_bias, exact, initial_state);
}

const bool registered_path = register_composed(kOp);
TORCH_LIBRARY_FRAGMENT(assay, m) {
  m.def(
      "longhorn(Tensor x, Tensor dt, Tensor k, Tensor q, Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, "
      "bool exact=False, Tensor? initial_state=None) -> (Tensor y, Tensor final_state)",
      longhorn);
}

}  // namespace assay::ops
