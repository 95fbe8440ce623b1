#pragma once
// Parts that the RWKV generations share: the token shift, and starting values that depend on
// channel and layer. [RWKV-LM, BlinkDL]
#include <cmath>
#include <optional>

#include "nn/mixer.h"

namespace assay::nn::rwkv {

// x_{−1} = state[name] [B, d], none at the beginning; leaves x_{T−1} of x [B, T, d] there. As
// ops::token_shift takes it.
std::optional<at::Tensor> before(const at::Tensor& x, State& state, const std::string& name);

// Channel i of `count`: i / count and i / (count − 1), float64.
at::Tensor fraction(int64_t count);
at::Tensor ramp(int64_t count);
inline double depth(const Place& place) {
  return double(place.layer) / double(std::max<int64_t>(place.num_layers - 1, 1));
}
inline double height(const Place& place) {
  return 1 - double(place.layer) / double(place.num_layers);
}

// RWKV-7's ranks: factor · √d_model, rounded to 32, at least 32.
int64_t default_rank(double factor, int64_t d_model);

// RWKV-5 and 6, [d] float64: w₀ of the decay exp(−exp(w₀)), from −6 to −1; u, the bonus of
// the present token.
at::Tensor decay_start(const Place& place);
at::Tensor bonus_start(const Place& place);

// As the training code treats a low-rank path: W₁ starts at 0, W₂ at `up`, and neither decays.
// `bias` is for the bias, if the path has one.
void treat_low_rank(LowRank& path, const Start& up, const std::optional<Treatment>& bias);

// The norm of each head of a time mix. Its weight starts at ((layer + 1) / layers)^0.7.
std::shared_ptr<Norm> norm_of_heads(const Place& place, int64_t num_heads, double eps);

}  // namespace assay::nn::rwkv
