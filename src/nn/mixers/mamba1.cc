// Mamba-1's mixer: gated selective state space behind a short causal convolution.          [Gu & Dao 2023, Fig. 3, Alg.
// 2]
//   x, z = W_in h;  x ← silu(conv(x));  δ, B, C = W_x x;  Δ = softplus(W_Δ δ + b);  out = W_out (scan(x, Δ, A, B, C, D)
//   ⊙ silu(z))
// Initialisation as in state-spaces/mamba: A = −(1 … N), D = 1, softplus(b) log-uniform in [0.001, 0.1].
#include <torch/torch.h>

#include <cmath>

#include "nn/initial_values.h"
#include "nn/layers.h"
#include "nn/short_conv.h"
#include "ops/selective_scan/selective_scan.h"

namespace assay::nn {
namespace {

struct Mamba1 final : Mixer {
  struct Config {
    int64_t state_size = 16, expand = 2, conv_width = 4, dt_rank = 0;
    void fields(auto&& field) {
      field("state_size", state_size, "N, states a channel");
      field("expand", expand, "inner channels over d_model");
      field("conv_width", conv_width, "taps of the convolution; 0: none");
      field("dt_rank", dt_rank, "rank of the step's projection; 0: d_model / 16, rounded up");
    }
  };

  Mamba1(Config c, int64_t d_model) : config(c), inner(c.expand * d_model) {
    if (c.state_size < 1 || c.state_size > 256) fail("mamba1: state_size = {} must be 1 to 256", c.state_size);
    if (c.expand < 1) fail("mamba1: expand = {} must be positive", c.expand);
    if (config.dt_rank <= 0) config.dt_rank = (d_model + 15) / 16;
    in_proj = register_module("in_proj", std::make_shared<Linear>(d_model, 2 * inner, false));
    x_proj = register_module("x_proj", std::make_shared<Linear>(inner, config.dt_rank + 2 * c.state_size, false));
    dt_proj = register_module("dt_proj", std::make_shared<Linear>(config.dt_rank, inner, false));
    out_proj = register_module("out_proj", std::make_shared<Linear>(inner, d_model, false));
    conv = register_module("conv", std::make_shared<ShortConv>(inner, c.conv_width, true));
    dt_bias = register_parameter("dt_bias", torch::zeros({inner}));
    A_log = register_parameter("A_log", torch::arange(1, c.state_size + 1, torch::kFloat).log().repeat({inner, 1}));
    D = register_parameter("D", torch::ones({inner}));
  }

  at::Tensor forward(const at::Tensor& h, State& state) override {
    const auto xz = in_proj->forward(h).chunk(2, -1);
    const at::Tensor x = conv->forward(xz[0], state);
    const int64_t n = config.state_size;
    const auto parts = x_proj->forward(x).split_with_sizes({config.dt_rank, n, n}, -1);
    at::Tensor y;
    std::tie(y, state["ssm"]) =
        ops::selective_scan(x, dt_proj->forward(parts[0]), -A_log.exp(), parts[1].unsqueeze(2), parts[2].unsqueeze(2),
                            D, xz[1], dt_bias, /*delta_softplus=*/true, state.find("ssm"));
    return out_proj->forward(y);
  }

  double mixing_flops(int64_t) const override {
    return double(inner) * double(9 * config.state_size + 2 * config.conv_width);
  }

  bool initialise(const std::string& name, at::Tensor& parameter, at::Generator generator) override {
    if (name == "dt_proj.weight") {
      const double bound = 1 / std::sqrt(double(config.dt_rank));
      parameter.uniform_(-bound, bound, generator);
    } else if (name == "dt_bias") {
      log_uniform_steps(parameter, generator);
    } else {
      return conv->initialise(name, parameter, generator);
    }
    return true;
  }

  Config config;
  int64_t inner;
  std::shared_ptr<Linear> in_proj, x_proj, dt_proj, out_proj;
  std::shared_ptr<ShortConv> conv;
  at::Tensor dt_bias, A_log, D;
};

const RegisterMixer<Mamba1> registered(
    "mamba1", "S_t = exp(Δ_t A) ⊙ S_{t−1} + Δ_t x_t ⊗ B_t, y_t = S_t C_t + D x_t, gated by silu(z_t) [Gu & Dao 2023]",
    {{}, {.state_size = 5, .expand = 1, .conv_width = 2, .dt_rank = 3}});

}  // namespace
}  // namespace assay::nn
