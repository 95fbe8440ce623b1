// assay::longhorn: checks and registration.
#include <torch/torch.h>

#include "ops/core/paths.h"
#include "ops/core/register.h"
#include "ops/recurrence/channel_scan/channel_scan.h"
#include "ops/recurrence/longhorn/longhorn.h"
#include "ops/recurrence/matrix_recurrence/matrix_recurrence.h"

namespace assay::ops {
namespace {

constexpr const char* kOp = "longhorn";

void check(const at::Tensor& x, const at::Tensor& dt, const at::Tensor& k, const at::Tensor& q,
           const OptionalTensor& D, const OptionalTensor& z, const OptionalTensor& dt_bias,
           const OptionalTensor& initial_state) {
  check_dims(kOp, "x", x, 3, "[B, T, Dm]");
  check_dims(kOp, "dt", dt, 3, "[B, T, Dm] or [B, T, 1]");
  check_dims(kOp, "k", k, 3, "[B, T, N]");
  const int64_t batch = x.size(0);
  const int64_t time = x.size(1);
  const int64_t channels = x.size(2);
  const int64_t N = k.size(2);
  const int64_t rates = dt.size(2) == 1 ? 1 : channels;
  check_shape(kOp, "dt", dt, {batch, time, rates}, "[B, T, Dm] or [B, T, 1]");
  check_shape(kOp, "k", k, {batch, time, N}, "[B, T, N]");
  check_shape(kOp, "q", q, k.sizes(), "[B, T, N]");
  if (D) check_shape(kOp, "D", *D, {channels}, "[Dm]");
  if (z) check_shape(kOp, "z", *z, x.sizes(), "[B, T, Dm]");
  if (dt_bias) check_shape(kOp, "dt_bias", *dt_bias, {rates}, "[channels of dt]");
  if (initial_state)
    check_shape(kOp, "initial_state", *initial_state, {batch, channels, N}, "[B, Dm, N]");
  for (const auto& [name, tensor] : {std::pair("x", x), {"dt", dt}, {"k", k}, {"q", q}})
    check_like(kOp, name, tensor, "x", x);
  for (const auto& [name, tensor] :
       {std::pair("D", &D), {"z", &z}, {"dt_bias", &dt_bias}, {"initial_state", &initial_state}})
    if (*tensor) check_like(kOp, name, **tensor, "x", x);
}

// One head whose columns are the channels: the kernel's lanes.                  state [B, 1, N, Dm]
MatrixRecurrence by_columns(const at::Tensor& k, const at::Tensor& q, const at::Tensor& epsilon,
                            const at::Tensor& input, bool exact) {
  auto head = [](const at::Tensor& x) { return x.unsqueeze(2); };
  if (exact)
    return {.transition = Transition::rank_one,
            .q = head(q),
            .a = head(k),
            .b = head(k),
            .c = head(input),
            .e = head(-epsilon)};
  return {.transition = Transition::elementwise,
          .q = head(q),
          .k = head(k),
          .v = head(input),
          .a = head(k.square()),
          .e = head(-epsilon)};
}
// A head a channel with one column: a delta rule, or a decay of its own for every entry.
// The state is [B, Dm, N, 1].
MatrixRecurrence by_heads(const at::Tensor& k, const at::Tensor& q, const at::Tensor& epsilon,
                          const at::Tensor& input, bool exact) {
  const at::Tensor key = k.unsqueeze(2);
  const at::Tensor rate = epsilon.unsqueeze(-1);
  const at::Tensor value = input.unsqueeze(-1);
  if (exact)
    return {.transition = Transition::rank_one,
            .q = q.unsqueeze(2),
            .a = -rate * key,
            .b = key,
            .c = value};
  return {.q = q.unsqueeze(2), .k = key, .v = value, .decay = 1 - rate * key.square()};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> longhorn(const at::Tensor& x, const at::Tensor& dt,
                                            const at::Tensor& k, const at::Tensor& q,
                                            const OptionalTensor& D, const OptionalTensor& z,
                                            const OptionalTensor& dt_bias, bool exact,
                                            const OptionalTensor& initial_state) {
  check(x, dt, k, q, D, z, dt_bias, initial_state);
  const auto real = real_dtype(sequence_dtype({x, dt, k, q, or_undefined(z)}));
  const int64_t channels = x.size(2);
  const ChannelScan scan{
      .update = exact ? Update::exact : Update::diagonal,
      .x = x,
      .delta = dt.expand({-1, -1, channels}),
      .k = k,
      .q = q,
      .D = D,
      // one bias for all channels: its gradient is summed before it is rounded
      .z = z,
      .delta_bias = dt_bias ? OptionalTensor(dt_bias->to(real).expand({channels})) : dt_bias,
      .initial_state = initial_state};
  if (on_token_kernel(scan) || in_few_steps(scan)) return by_token_kernel(scan);
  const bool columns = x.is_cpu();
  // once: the gradients of both its uses are added before they are rounded
  const at::Tensor in = x.to(real);
  const Prepare prepare = [=](const std::vector<at::Tensor>& s) {
    const at::Tensor key = s[2].to(real);
    const at::Tensor input = s[0];
    const at::Tensor beta =
        at::sigmoid(s[4].defined() ? s[1].to(real) + s[4].to(real) : s[1].to(real));
    const at::Tensor epsilon =
        (beta / (1 + beta * key.square().sum(-1, true))).expand(input.sizes());
    return (columns ? by_columns : by_heads)(key, s[3].to(real), epsilon, epsilon * input, exact);
  };
  const at::Tensor state = first_state(initial_state, {x.size(0), x.size(2), k.size(2)}, real, x);
  const at::Tensor bias = dt_bias ? dt_bias->unsqueeze(0).unsqueeze(0) : at::Tensor();
  const auto [sums, last] =
      recurrence(prepare, {in, dt, k, q, bias},
                 columns ? state.transpose(1, 2).unsqueeze(1) : state.unsqueeze(-1), x.size(1),
                 /*chunk_size=*/16);
  at::Tensor y = columns ? sums.squeeze(2) : sums.squeeze(-1);
  if (D) y = y + D->to(real) * in;
  if (z) y = y * at::silu(z->to(real));
  return {y.to(x.scalar_type()),
          (columns ? last.squeeze(1).transpose(1, 2) : last.squeeze(-1)).contiguous()};
}

const bool registered_path = register_paths(
    kOp, cpu_kernel_path(), token_kernel_path("composed of batched products"), /*cuda_numerics=*/2);
TORCH_LIBRARY_FRAGMENT(assay, m) {
  register_operator(
      m,
      "longhorn(Tensor x, Tensor dt, Tensor k, Tensor q, Tensor? D=None, Tensor? z=None, "
      "Tensor? dt_bias=None, bool exact=False, Tensor? initial_state=None) -> (Tensor y, "
      "Tensor final_state)",
      "S_t = (1 − ε_t ⊗ k_t²) ⊙ S_{t−1} + (ε_t ⊙ x_t) ⊗ k_t, ε = β / (1 + β kᵀk), "
      "y_t = S_t q_t + D x_t",
      longhorn);
}

}  // namespace assay::ops
