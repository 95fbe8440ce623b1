// assay::causal_conv1d: checks, casts, and the autograd function around the kernels.
#include <torch/torch.h>

#include "ops/core/dispatch.h"
#include "ops/core/register.h"
#include "ops/core/split.h"
#include "ops/recurrence/causal_conv1d/causal_conv1d.h"
#include "ops/recurrence/causal_conv1d/kernel.h"

namespace assay::ops {
namespace {

constexpr const char* kOp = "causal_conv1d";
constexpr int64_t kMaxWidth = 32;
constexpr int64_t kMaxCudaWidth = 8;

// As the kernels want them; what is absent is undefined.
struct Inputs {
  at::Tensor x;
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor initial_state;
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
                               bool silu, at::IntArrayRef parts) {
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
    const at::AutoDispatchBelowADInplaceOrView no_views;
    variable_list out = parts.size() > 1 ? y.split_with_sizes(parts, -1) : variable_list{y};
    ctx->saved_data["parts"] = parts.vec();
    out.push_back(final_state);
    return out;
  }

  // Gradients of the parts of y, which the kernel of CUDA reads as they are.
  static variable_list gradients_of_parts(const variable_list& gradients,
                                          const std::vector<int64_t>& parts, const at::Tensor& x) {
    variable_list dy;
    for (size_t i = 0; i < parts.size(); ++i)
      dy.push_back(gradients[i].defined()
                       ? sequence(gradients[i], x.scalar_type())
                       : at::zeros({x.size(0), x.size(1), parts[i]}, x.options()));
    const bool joined = dy.size() > 1 && (x.is_cpu() || dy.size() > kConvParts);
    return joined ? variable_list{at::cat(dy, -1)} : dy;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list s = ctx->get_saved_variables();
    const Inputs in{s[0], s[1], s[2], s[3], ctx->saved_data["silu"].toBool()};
    auto like = [](const at::Tensor& t) {
      return t.defined() ? at::empty(t.sizes(), t.options()) : at::Tensor();
    };
    const variable_list dy =
        gradients_of_parts(gradients, ctx->saved_data["parts"].toIntVector(), in.x);
    const at::Tensor& dlast = gradients.back();
    const at::Tensor dfinal_state = dlast.defined() ? dlast.contiguous() : dlast;
    const at::Tensor dx = gradient_memory(in.x);
    const at::Tensor dweight = like(in.weight);
    const at::Tensor dbias = like(in.bias);
    const at::Tensor dstate = like(in.initial_state);
    CausalConv1dBackward q{describe(in)};
    for (size_t i = 0; i < dy.size(); ++i) {
      q.dy[i] = view(dy[i]);
      if (i > 0) q.first[i] = q.first[i - 1] + dy[i - 1].size(2);
    }
    q.dfinal_state = data(dfinal_state);
    q.dx = view(dx);
    q.dweight = data(dweight);
    q.dbias = data(dbias);
    q.dinitial_state = data(dstate);
    launch(q, in.x.device());
    return {dx, dweight, dbias, dstate, at::Tensor(), at::Tensor()};
  }
};

void check(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
           std::string_view activation, const OptionalTensor& initial_state) {
  check_dims(kOp, "x", x, 3, "[B, T, Dm]");
  check_dims(kOp, "weight", weight, 2, "[Dm, K]");
  const int64_t channels = x.size(2);
  const int64_t width = weight.size(1);
  const int64_t most = x.is_cuda() ? kMaxCudaWidth : kMaxWidth;
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

std::pair<std::vector<at::Tensor>, at::Tensor> causal_conv1d_parts(
    const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
    std::string_view activation, const OptionalTensor& initial_state, at::IntArrayRef parts) {
  check(x, weight, bias, activation, initial_state);
  if (x.is_meta()) {
    const at::ScalarType real = real_dtype(sequence_dtype({x}));
    return {at::empty(x.sizes(), x.options()).split_with_sizes(parts, -1),
            at::empty({x.size(0), x.size(2), weight.size(1) - 1}, x.options().dtype(real))};
  }
  if (!x.is_cpu() && !on_gpu(x.device())) {
    const auto [y, last] = causal_conv1d_reference(x, weight, bias, activation, initial_state);
    return {y.split_with_sizes(parts, -1), last};
  }
  const auto dtype = sequence_dtype({x});
  const auto real = real_dtype(dtype);
  variable_list out = CausalConv1d::apply(
      sequence(x, dtype), parameter(weight, real), optional(parameter(bias, real)),
      optional(parameter(initial_state, real)), activation == "silu", parts);
  const at::Tensor last = out.back();
  out.pop_back();
  for (at::Tensor& part : out) part = part.to(x.scalar_type());
  return {std::move(out), last};
}

std::tuple<at::Tensor, at::Tensor> causal_conv1d(const at::Tensor& x, const at::Tensor& weight,
                                                 const OptionalTensor& bias,
                                                 std::string_view activation,
                                                 const OptionalTensor& initial_state) {
  const auto [y, last] =
      causal_conv1d_parts(x, weight, bias, activation, initial_state, x.sizes().slice(x.dim() - 1));
  return {y[0], last};
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
