// assay::causal_conv1d: checks, casts, and the autograd function around the kernels.
#include <torch/torch.h>

#include "ops/causal_conv1d/causal_conv1d.h"
#include "ops/causal_conv1d/kernel.h"
#include "ops/dispatch.h"
#include "ops/register.h"

namespace assay::ops {
namespace {

constexpr const char* kOp = "causal_conv1d";
constexpr int64_t kMaxWidth = 32, kMaxCudaWidth = 8;

// As the kernels want them; what is absent is undefined.
struct Inputs {
  at::Tensor x, weight, bias, initial_state;
  bool silu;
};

CausalConv1dForward describe(const Inputs& in) {
  CausalConv1dForward p{kernel_dtype(in.x.scalar_type()),
                        in.x.size(0),
                        in.x.size(1),
                        in.x.size(2),
                        in.weight.size(1),
                        in.silu};
  p.x = view(in.x);
  p.weight = data(in.weight);
  p.bias = data(in.bias);
  p.initial_state = data(in.initial_state);
  return p;
}

void launch(const CausalConv1dForward& p, const at::Device& device) {
  dispatch(
      device, [&](const auto& pool) { cpu::causal_conv1d(p, pool); },
      [&](auto stream) { cuda::causal_conv1d(p, stream); });
}
void launch(const CausalConv1dBackward& bwd, const at::Device& device) {
  const auto scratch = [&](size_t bytes) { return workspace(bytes, device); };
  dispatch(
      device,
      [&](const auto& pool) {
        cpu::causal_conv1d(bwd, scratch(cpu::workspace_bytes(bwd)).data_ptr(), pool);
      },
      [&](auto stream) {
        cuda::causal_conv1d(bwd, scratch(cuda::workspace_bytes(bwd)).data_ptr(), stream);
      });
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct CausalConv1d : torch::autograd::Function<CausalConv1d> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                               const OptionalTensor& bias, const OptionalTensor& initial_state,
                               bool silu) {
    const Inputs in{x, weight, or_undefined(bias), or_undefined(initial_state), silu};
    CausalConv1dForward p = describe(in);
    const at::Tensor y = at::empty({p.batch, p.time, p.channels}, x.options());
    const at::Tensor final_state = at::empty({p.batch, p.channels, p.width - 1}, weight.options());
    p.y = view(y);
    p.final_state = data(final_state);
    launch(p, x.device());
    ctx->save_for_backward({x, weight, in.bias, in.initial_state});
    ctx->saved_data["silu"] = silu;
    ctx->set_materialize_grads(false);
    return {y, final_state};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list s = ctx->get_saved_variables();
    const Inputs in{s[0], s[1], s[2], s[3], ctx->saved_data["silu"].toBool()};
    auto like = [](const at::Tensor& t) {
      return t.defined() ? at::empty(t.sizes(), t.options()) : at::Tensor();
    };
    auto dense = [](const at::Tensor& gradient) {
      return gradient.defined() ? gradient.contiguous() : gradient;
    };
    const at::Tensor dy = gradients[0].defined()
                              ? dense(gradients[0])
                              : at::zeros_like(in.x, at::MemoryFormat::Contiguous);
    const at::Tensor dfinal_state = dense(gradients[1]);
    const at::Tensor dx = like(in.x), dweight = like(in.weight), dbias = like(in.bias),
                     dstate = like(in.initial_state);
    CausalConv1dBackward q{describe(in)};
    q.dy = view(dy);
    q.dfinal_state = data(dfinal_state);
    q.dx = view(dx);
    q.dweight = data(dweight);
    q.dbias = data(dbias);
    q.dinitial_state = data(dstate);
    launch(q, in.x.device());
    return {dx, dweight, dbias, dstate, at::Tensor()};
  }
};

void check(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
           std::string_view activation, const OptionalTensor& initial_state) {
  check_dims(kOp, "x", x, 3, "[B, T, Dm]");
  check_dims(kOp, "weight", weight, 2, "[Dm, K]");
  const int64_t channels = x.size(2), width = weight.size(1),
                most = x.is_cuda() ? kMaxCudaWidth : kMaxWidth;
  check_shape(kOp, "weight", weight, {channels, width}, "[Dm, K]");
  TORCH_CHECK_VALUE(width <= most, kOp, ": weight has shape ", weight.sizes(),
                    ", [Dm, K]; K may be at most ", most, " on ", x.device());
  if (bias) check_shape(kOp, "bias", *bias, {channels}, "[Dm]");
  if (initial_state)
    check_shape(kOp, "initial_state", *initial_state, {x.size(0), channels, width - 1},
                "[B, Dm, K-1]");
  TORCH_CHECK_VALUE(activation == "none" || activation == "silu", kOp, ": activation is '",
                    activation, "', expected 'none' or 'silu'");
  check_like(kOp, "x", x, "x", x);
  check_like(kOp, "weight", weight, "x", x);
  if (bias) check_like(kOp, "bias", *bias, "x", x);
  if (initial_state) check_like(kOp, "initial_state", *initial_state, "x", x);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> causal_conv1d(const at::Tensor& x, const at::Tensor& weight,
                                                 const OptionalTensor& bias,
                                                 std::string_view activation,
                                                 const OptionalTensor& initial_state) {
  check(x, weight, bias, activation, initial_state);
  if (x.is_meta()) {
    const at::ScalarType real = real_dtype(sequence_dtype({x}));
    return {at::empty(x.sizes(), x.options()),
            at::empty({x.size(0), x.size(2), weight.size(1) - 1}, x.options().dtype(real))};
  }
  if (!x.is_cpu() && !(x.is_cuda() && kCudaKernels))
    return causal_conv1d_reference(x, weight, bias, activation, initial_state);
  const auto dtype = sequence_dtype({x}), real = real_dtype(dtype);
  const auto out = CausalConv1d::apply(
      sequence(x, dtype), parameter(weight, real), optional(parameter(bias, real)),
      optional(parameter(initial_state, real)), activation == "silu");
  return {out[0].to(x.scalar_type()), out[1]};
}

const bool registered_path = register_kernels(kOp);
TORCH_LIBRARY_FRAGMENT(assay, m) {
  register_operator(
      m,
      "causal_conv1d(Tensor x, Tensor weight, Tensor? bias=None, str activation='none', "
      "Tensor? initial_state=None) -> (Tensor y, Tensor final_state)",
      "y_t = activation(bias + Σ_j weight_j ⊙ x_{t−(K−1)+j}), "
      "depthwise over the last K positions",
      causal_conv1d);
}

}  // namespace assay::ops
