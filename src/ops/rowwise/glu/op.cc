// The gated linear unit: checks, the autograd function around the kernels, and the reference
// implementation.
#include <torch/torch.h>

#include <cmath>

#include "ops/core/dispatch.h"
#include "ops/rowwise/glu/glu.h"
#include "ops/rowwise/glu/kernel.h"

namespace assay::ops {
namespace {

constexpr const char* kOp = "glu";

Glu describe(const at::Tensor& h, bool silu) {
  const int64_t width = h.size(-1) / 2;
  const auto [c, a] = glu_activation(silu ? "silu" : "gelu");
  return {kernel_dtype(h.scalar_type()), h.numel() / (2 * width), width, c, a, data(h), nullptr};
}

template <class Arguments>
void launch(const Arguments& arguments, const at::Device& device) {
  dispatch(
      device, [&](const auto& pool) { cpu::glu(arguments, pool); },
      [&](auto stream) { cuda::glu(arguments, stream); });
}

struct GluFunction : torch::autograd::Function<GluFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& h, bool silu) {
    auto shape = h.sizes().vec();
    shape.back() /= 2;
    const at::Tensor y = at::empty(shape, h.options());
    Glu p = describe(h, silu);
    p.y = data(y);
    launch(p, h.device());
    ctx->save_for_backward({h});
    ctx->saved_data["silu"] = silu;
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& gradients) {
    const at::Tensor h = ctx->get_saved_variables()[0];
    const at::Tensor dy = gradients[0].contiguous();
    const at::Tensor dh = at::empty_like(h);
    launch(GluBackward{describe(h, ctx->saved_data["silu"].toBool()), data(dy), data(dh)},
           h.device());
    return {dh, at::Tensor()};
  }
};

}  // namespace

at::Tensor glu_reference(const at::Tensor& h, std::string_view activation) {
  const auto parts = h.chunk(2, -1);
  return (activation == "silu" ? at::silu(parts[0]) : at::gelu(parts[0], "tanh")) * parts[1];
}

GluActivation glu_activation(std::string_view activation) {
  TORCH_CHECK_VALUE(activation == "silu" || activation == "gelu", kOp, ": activation is '",
                    activation, "', expected 'silu' or 'gelu'");
  return activation == "silu" ? GluActivation{1, 0}
                              : GluActivation{2 * std::sqrt(2 / M_PI), 0.044715};
}

at::Tensor glu(const at::Tensor& h, std::string_view activation) {
  TORCH_CHECK_VALUE(h.dim() > 0 && h.size(-1) % 2 == 0 && h.numel() > 0, kOp, ": h has shape ",
                    h.sizes(), ", expected [..., 2 F]");
  glu_activation(activation);
  check_like(kOp, "h", h, "h", h);
  if (!h.is_cpu() && !on_gpu(h.device())) return glu_reference(h, activation);
  return GluFunction::apply(parameter(h, sequence_dtype({h})), activation == "silu")
      .to(h.scalar_type());
}

const bool registered_path = register_kernels(kOp);

}  // namespace assay::ops
