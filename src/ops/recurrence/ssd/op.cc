// assay::ssd: checks and registration.
#include <torch/torch.h>

#include <bit>

#include "ops/core/register.h"
#include "ops/recurrence/channel_scan/channel_scan.h"
#include "ops/recurrence/matrix_recurrence/matrix_recurrence.h"
#include "ops/recurrence/ssd/ssd.h"

namespace assay::ops {
namespace {

constexpr const char* kOp = "ssd";

void check(const at::Tensor& x, const at::Tensor& dt, const at::Tensor& A, const at::Tensor& B,
           const at::Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
           const OptionalTensor& dt_bias, const OptionalTensor& initial_state, int64_t chunk_size) {
  check_dims(kOp, "x", x, 4, "[B, T, H, P]");
  check_dims(kOp, "B", B, 4, "[B, T, G, N]");
  const int64_t batch = x.size(0);
  const int64_t time = x.size(1);
  const int64_t heads = x.size(2);
  const int64_t groups = B.size(2);
  const int64_t N = B.size(3);
  check_shape(kOp, "dt", dt, {batch, time, heads}, "[B, T, H]");
  check_shape(kOp, "A", A, {heads}, "[H]");
  check_shape(kOp, "B", B, {batch, time, groups, N}, "[B, T, G, N]");
  TORCH_CHECK_VALUE(heads % groups == 0, kOp, ": B has ", groups,
                    " groups (its size 2), which do not divide the ", heads, " heads of x");
  check_shape(kOp, "C", C, B.sizes(), "[B, T, G, N]");
  if (D) check_shape(kOp, "D", *D, {heads}, "[H]");
  if (z) check_shape(kOp, "z", *z, x.sizes(), "[B, T, H, P]");
  if (dt_bias) check_shape(kOp, "dt_bias", *dt_bias, {heads}, "[H]");
  if (initial_state)
    check_shape(kOp, "initial_state", *initial_state, {batch, heads, x.size(3), N}, "[B, H, P, N]");
  TORCH_CHECK_VALUE(chunk_size >= 1, kOp, ": chunk_size is ", chunk_size, ", expected at least 1");
  for (const auto& [name, tensor] : {std::pair("x", x), {"dt", dt}, {"A", A}, {"B", B}, {"C", C}})
    check_like(kOp, name, tensor, "x", x);
  for (const auto& [name, tensor] :
       {std::pair("D", &D), {"z", &z}, {"dt_bias", &dt_bias}, {"initial_state", &initial_state}})
    if (*tensor) check_like(kOp, name, **tensor, "x", x);
}

// As Mamba-1's scan, of channels that share Δ and A by heads. Undefined but for the few steps of
// decoding on CUDA.
std::tuple<at::Tensor, at::Tensor> by_few_steps(const at::Tensor& x, const at::Tensor& dt,
                                                const at::Tensor& A, const at::Tensor& B,
                                                const at::Tensor& C, const OptionalTensor& D,
                                                const OptionalTensor& z,
                                                const OptionalTensor& dt_bias, bool dt_softplus,
                                                const OptionalTensor& initial_state) {
  if (!x.is_cuda() || x.size(1) > kMaxTokenDecodeSteps) return {};
  ChannelScan scan{Update::decay, dt_softplus,   x.flatten(2), dt, B, C, A, D, z,
                   dt_bias,       initial_state, x.size(3)};
  if (z) scan.z = z->flatten(2);
  if (!in_few_steps(scan)) return {};
  const auto [y, last] = by_token_kernel(scan);
  return {y.view(x.sizes()), last.view({x.size(0), x.size(2), x.size(3), B.size(3)})};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> ssd(const at::Tensor& x, const at::Tensor& dt,
                                       const at::Tensor& A, const at::Tensor& B,
                                       const at::Tensor& C, const OptionalTensor& D,
                                       const OptionalTensor& z, const OptionalTensor& dt_bias,
                                       bool dt_softplus, const OptionalTensor& initial_state,
                                       int64_t chunk_size) {
  check(x, dt, A, B, C, D, z, dt_bias, initial_state, chunk_size);
  if (auto steps = by_few_steps(x, dt, A, B, C, D, z, dt_bias, dt_softplus, initial_state);
      std::get<0>(steps).defined())
    return steps;
  const auto real = real_dtype(sequence_dtype({x, dt, B, C, or_undefined(z)}));
  const Prepare prepare = [=](const std::vector<at::Tensor>& s) {
    at::Tensor delta = s[1].to(real);
    if (s[5].defined()) delta = delta + s[5].to(real);
    if (dt_softplus) delta = at::softplus(delta);
    MatrixRecurrence steps{
        .q = s[4], .k = s[3], .v = s[0], .log_decay = (delta * s[2].to(real)).unsqueeze(-1)};
    steps.rate = delta.unsqueeze(-1);
    if (s[6].defined()) steps.skip = s[6].flatten();
    return steps;
  };
  auto every_step = [](const OptionalTensor& x) {
    return x ? x->unsqueeze(0).unsqueeze(0) : at::Tensor();
  };
  const at::Tensor state =
      first_state(initial_state, {x.size(0), x.size(2), x.size(3), B.size(3)}, real, x);
  auto [y, last] =
      recurrence(prepare, {x, dt, every_step(A), B, C, every_step(dt_bias), every_step(D)},
                 state.transpose(2, 3), x.size(1), int64_t(std::bit_ceil(uint64_t(chunk_size))));
  if (z) y = y * at::silu(z->to(real));
  return {y.to(x.scalar_type()), last.transpose(2, 3).contiguous()};
}

const bool registered_path = register_matrix_recurrence(kOp, /*cuda_numerics=*/3);
TORCH_LIBRARY_FRAGMENT(assay, m) {
  register_operator(
      m,
      "ssd(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D=None, Tensor? z=None, "
      "Tensor? dt_bias=None, bool dt_softplus=False, Tensor? initial_state=None, "
      "int chunk_size=64) -> (Tensor y, Tensor final_state)",
      "S_t = exp(Δ_t A) S_{t−1} + Δ_t x_t B_tᵀ, y_t = (S_t C_t + D x_t) ⊙ silu(z_t), "
      "one decay per head",
      ssd);
}

}  // namespace assay::ops
