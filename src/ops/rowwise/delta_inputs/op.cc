// The inputs of a delta rule with a decay per channel: checks, and the operators around the
// kernels.
#include "ops/core/rowwise_op.h"
#include "ops/rowwise/delta_inputs/delta_inputs.h"
#include "ops/rowwise/delta_inputs/kernel.h"

namespace assay::ops {
namespace {

void check_all(const char* op, int64_t heads, const std::vector<NamedTensor>& sequences,
               const at::Tensor& bias, const at::Tensor& rate) {
  check_sequences(op, heads, sequences);
  const at::Tensor& q = sequences[0].tensor;
  check_shape(op, "bias", bias, {q.size(-1)}, "[D]");
  check_shape(op, "rate", rate, {heads}, "[heads]");
  check_like(op, "bias", bias, "q", q);
  check_like(op, "rate", rate, "q", q);
}

// The parameters of the kernels, [heads, D / heads] each.
std::vector<at::Tensor> by_channel(const at::Tensor& bias, const at::Tensor& rate, int64_t heads) {
  const at::Tensor rows = bias.unflatten(-1, {heads, -1});
  return {rows, rate.unsqueeze(-1).expand_as(rows)};
}
DeltaRuleInputs named(const std::vector<at::Tensor>& y) { return {y[0], y[1], y[2], y[3]}; }

}  // namespace

DeltaRuleInputs kda_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& f,
                           const at::Tensor& beta, const at::Tensor& bias, const at::Tensor& rate,
                           double bound, int64_t heads) {
  constexpr const char* op = "kda_inputs";
  check_all(op, heads, {{"q", q}, {"k", k}, {"f", f}}, bias, rate);
  auto shape = q.sizes().vec();
  shape.back() = heads;
  check_shape(op, "beta", beta, shape, "[..., heads]");
  check_like(op, "beta", beta, "q", q);
  if (!has_rowwise_kernel(q, heads))
    return kda_inputs_reference(q, k, f, beta, bias, rate, bound, heads);
  auto parameters = by_channel(bias, rate, heads);
  if (!(bound < 0))
    return named(
        rowwise<KdaInputsUnbounded>({q, k, f}, parameters, kDeltaInputsEps, heads, {beta}));
  parameters.push_back(at::full_like(parameters[0], bound));
  return named(rowwise<KdaInputsBounded>({q, k, f}, parameters, kDeltaInputsEps, heads, {beta}));
}

DeltaRuleInputs gdn2_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& f,
                            const at::Tensor& e, const at::Tensor& bias, const at::Tensor& rate,
                            double scale, int64_t heads) {
  check_all("gdn2_inputs", heads, {{"q", q}, {"k", k}, {"f", f}, {"e", e}}, bias, rate);
  if (!has_rowwise_kernel(q, heads))
    return gdn2_inputs_reference(q, k, f, e, bias, rate, scale, heads);
  auto parameters = by_channel(bias, rate, heads);
  parameters.push_back(at::full_like(parameters[0], scale));
  return named(rowwise<Gdn2Inputs>({q, k, f, e}, parameters, kDeltaInputsEps, heads));
}

const bool registered_delta_inputs =
    register_kernels("kda_inputs") && register_kernels("gdn2_inputs");

}  // namespace assay::ops
