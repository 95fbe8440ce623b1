// RWKV's channel mixes: a squared ReLU on a token mixed with the one before it. [Peng et
// al. 2024; 2025]
//   δ_t = x_{t−1} − x_t
//   rwkv5_channel_mix    σ(R x^r) ⊙ W₂ relu(W₁ x^k)²     x^c = x + δ ⊙ (1 − mix_c)
//   rwkv6_channel_mix    σ(R x^r) ⊙ W₂ relu(W₁ x^k)²     x^c = x + δ ⊙ mix_c
//   rwkv7_channel_mix    W₂ relu(W₁ x^k)²                x^k = x + δ ⊙ mix_k
// As RWKV-LM's training code has them, starting values included: W₁ orthogonal, R and W₂ zero. The
// mix of RWKV-5 and RWKV-6 starts as in the code of their papers, before November 2024.
#include "nn/rwkv.h"

#include <torch/torch.h>

#include <cmath>

#include "nn/initial_values.h"
#include "nn/layers.h"
#include "ops/recurrence/token_shift/token_shift.h"
#include "ops/rowwise/squared_relu/squared_relu.h"

namespace assay::nn {
namespace {

template <int version>
struct RwkvChannelMix final : Mixer {
  static constexpr bool gated = version < 7;
  struct Config {
    int64_t d_ff = 0;
    void fields(auto&& field) {
      field("d_ff", d_ff,
            gated ? "hidden width; 0: 3.5 d_model, rounded down to 32"
                  : "hidden width; 0: 4 d_model");
    }
  };

  RwkvChannelMix(const Config& c, const Place& p) {
    const int64_t d = p.d_model;
    const int64_t hidden = c.d_ff > 0 ? c.d_ff : gated ? d * 7 / 2 / 32 * 32 : 4 * d;
    const double power = gated ? rwkv::height(p) : std::pow(rwkv::height(p), 4);
    const at::Tensor row = of_previous(1 - rwkv::fraction(d).pow(power));
    mix = add_parameter("mix", torch::zeros({gated ? 2 : 1, d}),
                        {.start = values(row.expand({gated ? 2 : 1, d}))});
    in_proj = add_linear("in_proj", d, hidden, {.start = orthogonal(1)});
    if (gated) r_proj = add_linear("r_proj", d, d, {.start = constant(0)});
    out_proj = add_linear("out_proj", hidden, d, {.role = Role::output, .start = constant(0)});
  }

  at::Tensor forward(const at::Tensor& x, State& state) override {
    const auto shifted =
        ops::token_shift(x, rwkv::before(x, state, "channel_shift"), of_previous(mix));
    const at::Tensor y = out_proj->forward(ops::squared_relu(in_proj->forward(shifted[0])));
    return gated ? r_proj->forward(shifted[1]).sigmoid() * y : y;
  }

  // Converts the parameter to the weights of the previous token, and these back to the parameter.
  static at::Tensor of_previous(const at::Tensor& weights) {
    return version == 5 ? 1 - weights : weights;
  }

  double mixing_flops(int64_t) const override { return 0; }

  std::shared_ptr<Linear> in_proj;
  std::shared_ptr<Linear> r_proj;
  std::shared_ptr<Linear> out_proj;
  at::Tensor mix;  // [1 or 2, d], of k and r
};

const RegisterChannelMixer<RwkvChannelMix<5>> five(
    "rwkv5_channel_mix",
    "σ(R x^r) ⊙ W₂ relu(W₁ x^k)², tokens mixed with the one before [Peng et al. 2024]",
    {{}, {.d_ff = 40}});
const RegisterChannelMixer<RwkvChannelMix<6>> six(
    "rwkv6_channel_mix",
    "σ(R x^r) ⊙ W₂ relu(W₁ x^k)², tokens mixed with the one before [Peng et al. 2024]",
    {{}, {.d_ff = 40}});
const RegisterChannelMixer<RwkvChannelMix<7>> seven(
    "rwkv7_channel_mix", "W₂ relu(W₁ x^k)², tokens mixed with the one before [Peng et al. 2025]",
    {{}, {.d_ff = 40}});

}  // namespace
}  // namespace assay::nn
