// Longhorn's mixer: each channel's state is the closed-form answer of an online regression,
// in Mamba's block.
//   x, z = W_in h     x ← silu(conv(x))     r, k, q = W_x x     β = σ(W_β r + b)
//       ε = β / (1 + β kᵀk)
//   S_t = (1 − ε_t ⊗ k_t²) ⊙ S_{t−1} + (ε_t ⊙ x_t) ⊗ k_t        y_t = S_t q_t + D ⊙ x_t
//       [Liu et al. 2024, Alg. 1]
//   out = W_out (y ⊙ silu(z))
// As the official code has it, β comes through a low rank (the paper: a full matrix). scalar_beta:
// one β for all channels. exact: S_t = S_{t−1} (I − ε_t k_t k_tᵀ) + …, before the diagonal
// approximation. b starts at 0: β near ½. The matrices start as in Mamba.
#include "ops/recurrence/longhorn/longhorn.h"

#include <torch/torch.h>

#include <cmath>

#include "nn/initial_values.h"
#include "nn/layers.h"
#include "nn/short_conv.h"
#include "ops/core/split.h"

namespace assay::nn {
namespace {

struct Longhorn final : ProjectedMixer {
  struct Config {
    int64_t state_size = 16;
    int64_t expand = 2;
    int64_t conv_width = 4;
    int64_t dt_rank = 0;
    bool scalar_beta = false;
    bool exact = false;
    void fields(auto&& field) {
      field("state_size", state_size, "N, states per channel");
      field("expand", expand, "inner channels over d_model");
      field("conv_width", conv_width, "taps of the convolution; 0: none");
      field("dt_rank", dt_rank, "rank of the projection to β; 0: d_model / 16, rounded up");
      field("scalar_beta", scalar_beta, "one β for all channels");
      field("exact", exact, "the update before its diagonal approximation");
    }
  };

  Longhorn(const Config& c, const Place& p) : config(c), inner(c.expand * p.d_model) {
    const int64_t d_model = p.d_model;
    if (c.state_size < 1 || c.expand < 1)
      fail("longhorn: state_size = {} and expand = {} must be positive", c.state_size, c.expand);
    if (config.dt_rank <= 0) config.dt_rank = (d_model + 15) / 16;
    const int64_t betas = c.scalar_beta ? 1 : inner;
    in_proj = add_linear("in_proj", d_model, 2 * inner, {.start = uniform_by_width()});
    conv = register_module("conv", std::make_shared<ShortConv>(inner, c.conv_width, true));
    x_proj = add_linear("x_proj", inner, config.dt_rank + 2 * c.state_size,
                        {.start = uniform_by_width()});
    dt_proj = add_linear("dt_proj", config.dt_rank, betas, {.start = uniform_by_width()});
    out_proj =
        add_linear("out_proj", inner, d_model, {.role = Role::output, .start = mamba_output(p)});
    dt_bias = add_parameter("dt_bias", torch::zeros({betas}));
    D = add_parameter("D", torch::ones({inner}));
  }

  Projection input_projection() const override { return in_proj->projection(); }
  at::Tensor mix(const at::Tensor& projected, State& state) override {
    const auto xz = ops::split(projected, {inner, inner});
    const at::Tensor x = conv->forward(xz[0], state);
    const auto part = x_proj->forward(x).split_with_sizes(
        {config.dt_rank, config.state_size, config.state_size}, -1);
    at::Tensor y;
    std::tie(y, state["S"]) = ops::longhorn(x, dt_proj->forward(part[0]), part[1], part[2], D,
                                            xz[1], dt_bias, config.exact, state.find("S"));
    return out_proj->forward(y);
  }

  double mixing_flops(int64_t) const override {
    return double(inner) * double(8 * config.state_size + 2 * config.conv_width);
  }

  // 2: the projections start as in the official code. 1: N(0, 0.02), out_proj / √(2 num_layers).
  int numerics() const override { return 2; }

  Config config;
  int64_t inner;
  std::shared_ptr<Linear> in_proj;
  std::shared_ptr<Linear> x_proj;
  std::shared_ptr<Linear> dt_proj;
  std::shared_ptr<Linear> out_proj;
  std::shared_ptr<ShortConv> conv;
  at::Tensor dt_bias;
  at::Tensor D;
};

const RegisterMixer<Longhorn> registered(
    "longhorn",
    "S_t = (1 − ε_t ⊗ k_t²) ⊙ S_{t−1} + (ε_t ⊙ x_t) ⊗ k_t, ε = β / (1 + β kᵀk), "
    "y_t = S_t q_t + D x_t, gated [Liu et al. 2024]",
    {{},
     {.state_size = 5, .expand = 1, .conv_width = 2, .dt_rank = 3, .scalar_beta = true},
     {.state_size = 6, .exact = true}});

}  // namespace
}  // namespace assay::nn
