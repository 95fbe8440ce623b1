#include <torch/torch.h>

#include "ops/rowwise/delta_inputs/delta_inputs.h"
#include "ops/rowwise/delta_inputs/kernel.h"

namespace assay::ops {
namespace {

// f(q̂, k̂, a, the rate [heads, 1]), all by head, as g, written and removed by head.
template <class F>
DeltaRuleInputs by_head(const at::Tensor& q, const at::Tensor& k, const at::Tensor& f,
                        const at::Tensor& bias, const at::Tensor& rate, int64_t heads, F&& of) {
  const auto real = at::promote_types(q.scalar_type(), at::kFloat);
  const auto parts = [&](const at::Tensor& x) { return x.to(real).unflatten(-1, {heads, -1}); };
  const auto unit = [&](const at::Tensor& x) {
    return parts(x) * at::rsqrt(parts(x).square().sum(-1, true) + kDeltaInputsEps);
  };
  const auto narrow = [&](const at::Tensor& x) { return x.flatten(-2).to(q.scalar_type()); };
  const auto [g, written, removed] = of(unit(k), parts(f) + parts(bias), rate.unsqueeze(-1));
  return {g.flatten(-2), narrow(unit(q)), narrow(written), narrow(removed)};
}
// The threshold of torch's softplus would make it the identity for arguments above 20.
at::Tensor exact_softplus(const at::Tensor& x) { return at::softplus(x, 1, 50); }

}  // namespace

DeltaRuleInputs kda_inputs_reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& f,
                                     const at::Tensor& beta, const at::Tensor& bias,
                                     const at::Tensor& rate, double bound, int64_t heads) {
  return by_head(q, k, f, bias, rate, heads,
                 [&](const at::Tensor& unit, const at::Tensor& a, const at::Tensor& by) {
                   const at::Tensor g =
                       bound < 0 ? bound * (by * a).sigmoid() : -by * exact_softplus(a);
                   return std::tuple(g, unit * beta.unsqueeze(-1), -unit * g.exp());
                 });
}

DeltaRuleInputs gdn2_inputs_reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& f,
                                      const at::Tensor& e, const at::Tensor& bias,
                                      const at::Tensor& rate, double scale, int64_t heads) {
  return by_head(q, k, f, bias, rate, heads,
                 [&](const at::Tensor& unit, const at::Tensor& a, const at::Tensor& by) {
                   const at::Tensor g = -by * exact_softplus(a);
                   const at::Tensor erase =
                       scale * e.to(g.scalar_type()).sigmoid().unflatten(-1, {heads, -1});
                   return std::tuple(g, unit, -unit * (erase * g.exp()));
                 });
}

}  // namespace assay::ops
