// assay::selective_scan: checks, casts, and the autograd function around the kernels.
#include <torch/torch.h>

#include "ops/core/parallel.h"
#include "ops/core/paths.h"
#include "ops/core/register.h"
#include "ops/core/tensors.h"
#include "ops/recurrence/channel_scan/channel_scan.h"
#include "ops/recurrence/selective_scan/kernel.h"
#include "ops/recurrence/selective_scan/selective_scan.h"

namespace assay::ops {
namespace {

constexpr const char* kOp = "selective_scan";
constexpr int64_t kMaxStateSize = 256;

// As the kernels want them; what is absent is undefined.
struct Inputs {
  at::Tensor u;
  at::Tensor delta;
  at::Tensor A;
  at::Tensor B;
  at::Tensor C;
  at::Tensor D;
  at::Tensor z;
  at::Tensor delta_bias;
  at::Tensor initial_state;
  bool delta_softplus;
};

SelectiveScanForward describe(const Inputs& in) {
  SelectiveScanForward p{kernel_dtype(in.u.scalar_type()),
                         in.u.size(0),
                         in.u.size(1),
                         in.u.size(2),
                         in.B.size(2),
                         in.A.size(1),
                         in.delta_softplus};
  p.u = view(in.u);
  p.delta = view(in.delta);
  p.B = view(in.B);
  p.C = view(in.C);
  p.z = view(in.z);
  p.A = data(in.A);
  p.D = data(in.D);
  p.delta_bias = data(in.delta_bias);
  p.initial_state = data(in.initial_state);
  return p;
}

template <class Work>  // SelectiveScanForward or …Backward
void launch(const Work& work) {
  const at::Tensor scratch = workspace(cpu::workspace_bytes(work), at::kCPU);
  cpu::selective_scan(work, scratch.data_ptr(), at_parallel_for());
}

struct Outputs {
  // chunk_states undefined when no gradient is wanted
  at::Tensor y;
  at::Tensor final_state;
  at::Tensor chunk_states;
};

Outputs run(const Inputs& in, bool with_gradient) {
  SelectiveScanForward p = describe(in);
  const auto real = in.A.options();
  Outputs out{at::empty({p.batch, p.time, p.channels}, in.u.options()),
              at::empty({p.batch, p.channels, p.state_size}, real),
              {}};
  if (with_gradient)
    out.chunk_states = at::empty(
        {p.batch, (p.time + cpu::kChunk - 1) / cpu::kChunk, p.channels, p.state_size}, real);
  p.y = view(out.y);
  p.final_state = data(out.final_state);
  p.chunk_states = data(out.chunk_states);
  launch(p);
  return out;
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct SelectiveScan : torch::autograd::Function<SelectiveScan> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& u, const at::Tensor& delta,
                               const at::Tensor& A, const at::Tensor& B, const at::Tensor& C,
                               const OptionalTensor& D, const OptionalTensor& z,
                               const OptionalTensor& delta_bias,
                               const OptionalTensor& initial_state, bool delta_softplus) {
    const Inputs in{u,
                    delta,
                    A,
                    B,
                    C,
                    or_undefined(D),
                    or_undefined(z),
                    or_undefined(delta_bias),
                    or_undefined(initial_state),
                    delta_softplus};
    const Outputs out = run(in, true);
    ctx->save_for_backward(
        {u, delta, A, B, C, in.D, in.z, in.delta_bias, in.initial_state, out.chunk_states});
    ctx->saved_data["delta_softplus"] = delta_softplus;
    ctx->set_materialize_grads(false);
    return {out.y, out.final_state};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list s = ctx->get_saved_variables();
    const Inputs in{s[0], s[1], s[2], s[3], s[4],
                    s[5], s[6], s[7], s[8], ctx->saved_data["delta_softplus"].toBool()};
    auto like = [](const at::Tensor& tensor, const at::Tensor& dtype) {
      return tensor.defined() ? at::empty(tensor.sizes(), dtype.options()) : at::Tensor();
    };
    auto dense = [](const at::Tensor& gradient) {
      return gradient.defined() ? gradient.contiguous() : gradient;
    };
    const at::Tensor dy = gradients[0].defined()
                              ? dense(gradients[0])
                              : at::zeros_like(in.u, at::MemoryFormat::Contiguous);
    const at::Tensor dfinal_state = dense(gradients[1]);
    const at::Tensor du = like(in.u, in.u);
    const at::Tensor ddelta = like(in.delta, in.u);
    const at::Tensor dz = like(in.z, in.u);
    const at::Tensor dB = like(in.B, in.A);
    const at::Tensor dC = like(in.C, in.A);
    const at::Tensor dA = like(in.A, in.A);
    const at::Tensor dD = like(in.D, in.A);
    const at::Tensor dbias = like(in.delta_bias, in.A);
    const at::Tensor dinitial_state = like(in.initial_state, in.A);

    SelectiveScanBackward q{describe(in)};
    q.forward.chunk_states = data(s[9]);
    q.dy = view(dy);
    q.dfinal_state = data(dfinal_state);
    q.du = view(du);
    q.ddelta = view(ddelta);
    q.dz = view(dz);
    q.dB = data(dB);
    q.dC = data(dC);
    q.dA = data(dA);
    q.dD = data(dD);
    q.ddelta_bias = data(dbias);
    q.dinitial_state = data(dinitial_state);
    launch(q);
    const auto dtype = in.u.scalar_type();
    return {du, ddelta, dA,    dB.to(dtype),   dC.to(dtype),
            dD, dz,     dbias, dinitial_state, at::Tensor()};
  }
};

void check(const at::Tensor& u, const at::Tensor& delta, const at::Tensor& A, const at::Tensor& B,
           const at::Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
           const OptionalTensor& delta_bias, const OptionalTensor& initial_state) {
  check_dims(kOp, "u", u, 3, "[B, T, Dm]");
  const bool by_token = A.dim() == 3;
  if (!by_token) check_dims(kOp, "A", A, 2, "[Dm, N] or [B, T, N]");
  check_dims(kOp, "B", B, 4, "[B, T, G, N]");
  const int64_t batch = u.size(0);
  const int64_t time = u.size(1);
  const int64_t channels = u.size(2);
  const int64_t N = A.size(-1);
  const int64_t groups = B.size(2);
  check_shape(kOp, "delta", delta, u.sizes(), "[B, T, Dm]");
  if (by_token) check_shape(kOp, "A", A, {batch, time, N}, "[B, T, N]");
  else check_shape(kOp, "A", A, {channels, N}, "[Dm, N]");
  TORCH_CHECK_VALUE(N <= kMaxStateSize, kOp, ": A has shape ", A.sizes(),
                    ", [Dm, N] or [B, T, N]; N may be at most ", kMaxStateSize);
  check_shape(kOp, "B", B, {batch, time, groups, N}, "[B, T, G, N]");
  TORCH_CHECK_VALUE(channels % groups == 0, kOp, ": B has ", groups,
                    " groups (its size 2), which do not divide the ", channels, " channels of u");
  TORCH_CHECK_VALUE(!by_token || groups == 1, kOp, ": B has ", groups,
                    " groups (its size 2); where A is [B, T, N] it has 1");
  check_shape(kOp, "C", C, B.sizes(), "[B, T, G, N]");
  if (D) check_shape(kOp, "D", *D, {channels}, "[Dm]");
  if (z) check_shape(kOp, "z", *z, u.sizes(), "[B, T, Dm]");
  if (delta_bias) check_shape(kOp, "delta_bias", *delta_bias, {channels}, "[Dm]");
  if (initial_state)
    check_shape(kOp, "initial_state", *initial_state, {batch, channels, N}, "[B, Dm, N]");
  const std::pair<const char*, const at::Tensor*> all[] = {
      {"u", &u},
      {"delta", &delta},
      {"A", &A},
      {"B", &B},
      {"C", &C},
      {"D", D ? &*D : nullptr},
      {"z", z ? &*z : nullptr},
      {"delta_bias", delta_bias ? &*delta_bias : nullptr},
      {"initial_state", initial_state ? &*initial_state : nullptr}};
  for (const auto& [name, tensor] : all)
    if (tensor) check_like(kOp, name, *tensor, "u", u);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> selective_scan(
    const at::Tensor& u, const at::Tensor& delta, const at::Tensor& A, const at::Tensor& B,
    const at::Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
    const OptionalTensor& delta_bias, bool delta_softplus, const OptionalTensor& initial_state) {
  check(u, delta, A, B, C, D, z, delta_bias, initial_state);
  if (u.is_meta()) {
    const auto state =
        u.options().dtype(real_dtype(sequence_dtype({u, delta, B, C, or_undefined(z)})));
    return {at::empty(u.sizes(), u.options()),
            at::empty({u.size(0), u.size(2), A.size(-1)}, state)};
  }
  const ChannelScan scan{Update::decay, delta_softplus, u, delta, B, C, A, D, z,
                         delta_bias,    initial_state};
  if (in_few_steps(scan)) return by_token_kernel(scan);
  if (on_token_kernel(scan)) return by_token_kernel(scan);
  if (A.dim() == 3 || !u.is_cpu()) return by_prefixes(scan);
  const auto dtype = sequence_dtype({u, delta, B, C, or_undefined(z)});
  const auto real = real_dtype(dtype);
  const Inputs in{sequence(u, dtype), sequence(delta, dtype),      parameter(A, real),
                  sequence(B, dtype), sequence(C, dtype),          parameter(D, real),
                  sequence(z, dtype), parameter(delta_bias, real), parameter(initial_state, real),
                  delta_softplus};
  if (!wants_gradient(
          {in.u, in.delta, in.A, in.B, in.C, in.D, in.z, in.delta_bias, in.initial_state})) {
    const Outputs out = run(in, false);
    return {out.y.to(u.scalar_type()), out.final_state};
  }
  const auto out =
      SelectiveScan::apply(in.u, in.delta, in.A, in.B, in.C, optional(in.D), optional(in.z),
                           optional(in.delta_bias), optional(in.initial_state), delta_softplus);
  return {out[0].to(u.scalar_type()), out[1]};
}

const std::string composed = "composed from tensor arithmetic";
const bool registered_path =
    register_paths(kOp, cpu_kernel_path() + "; if A depends on the token, " + composed,
                   token_kernel_path(kCudaKernels ? composed : composed + ": built without CUDA"),
                   /*cuda_numerics=*/2);
TORCH_LIBRARY_FRAGMENT(assay, m) {
  register_operator(
      m,
      "selective_scan(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D=None, "
      "Tensor? z=None, Tensor? delta_bias=None, bool delta_softplus=False, "
      "Tensor? initial_state=None) -> (Tensor y, Tensor final_state)",
      "S_t = exp(Δ_t A) ⊙ S_{t−1} + Δ_t u_t ⊗ B_t, "
      "y_t = (S_t C_t + D ⊙ u_t) ⊙ silu(z_t)",
      selective_scan);
}

}  // namespace assay::ops
