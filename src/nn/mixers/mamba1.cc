// Mamba-1's mixer: gated selective state space behind a short causal convolution. [Gu & Dao 2023,
// Fig. 3, Alg. 2]
//   x, z = W_in h     x ← silu(conv(x))     δ, B, C = W_x x     Δ = softplus(W_Δ δ + b)
//   S_t = exp(Δ_t A) ⊙ S_{t−1} + Δ_t x_t ⊗ B_t     y_t = S_t C_t + D x_t
//       out = W_out (y ⊙ silu(z))
// Starting values as in state-spaces/mamba: A = −(1 … N), D = 1, softplus(b) log-uniform in [0.001,
// 0.1], the matrices as torch's Linear starts, W_out divided by √(residual branches).
//
// Ablations: conv_width = 0: no convolution. decay [BC §3] = "one": every channel and state
// decays by exp(a mean Δ_t), with one a, starting at −1; "none": no decay; in both, Δ still
// scales what is written. decay = "learnable" [Liu et al. 2024, §5]: exp(−Δ_t ⊗ A_t), A_t =
// softplus(W_A x_t + b_A) [N], which begins at (1 … N); the paper writes A_t = W_A x_t, and
// softplus keeps the state from growing.
#include <torch/torch.h>

#include <cmath>

#include "nn/cache.h"
#include "nn/initial_values.h"
#include "nn/layers.h"
#include "nn/short_conv.h"
#include "ops/core/split.h"
#include "ops/recurrence/linear_attention/linear_attention.h"
#include "ops/recurrence/selective_scan/selective_scan.h"

namespace assay::nn {
namespace {

struct Mamba1 final : ProjectedMixer {
  struct Config {
    int64_t state_size = 16;
    int64_t expand = 2;
    int64_t conv_width = 4;
    int64_t dt_rank = 0;
    std::string decay = "full";
    void fields(auto&& field) {
      field("state_size", state_size, "N, states per channel");
      field("expand", expand, "inner channels over d_model");
      field("conv_width", conv_width, "taps of the convolution; 0: none");
      field("dt_rank", dt_rank, "rank of the step's projection; 0: d_model / 16, rounded up");
      field("decay", decay,
            "full, one (shared by all channels and states), none, "
            "or learnable (A_t = −softplus(W_A x_t + b_A))");
    }
  };

  Mamba1(const Config& c, const Place& p)
      : config(c), inner(c.expand * p.d_model), N(c.state_size) {
    const int64_t d_model = p.d_model;
    if (N < 1 || N > 256) fail("mamba1: state_size = {} must be 1 to 256", N);
    if (c.expand < 1) fail("mamba1: expand = {} must be positive", c.expand);
    one_of("mamba1", "decay", c.decay, {"full", "one", "none", "learnable"});
    if (config.dt_rank <= 0) config.dt_rank = (d_model + 15) / 16;
    parts = {config.dt_rank, N, N};
    if (c.decay == "learnable") parts.push_back(N);
    in_proj = add_linear("in_proj", d_model, 2 * inner, {.start = uniform_by_width()});
    x_proj = add_linear("x_proj", inner, config.dt_rank + N * int64_t(parts.size() - 1),
                        {.start = uniform_by_width()});
    dt_proj = add_linear("dt_proj", config.dt_rank, inner, {.start = uniform_by_width()});
    out_proj =
        add_linear("out_proj", inner, d_model, {.role = Role::output, .start = mamba_output(p)});
    conv = register_module("conv", std::make_shared<ShortConv>(inner, c.conv_width, true));
    dt_bias = add_parameter("dt_bias", torch::zeros({inner}), {.start = log_uniform_steps()});
    D = add_parameter("D", torch::ones({inner}));
    const at::Tensor count = torch::arange(1, N + 1, torch::kFloat);
    if (c.decay == "full") A_log = add_parameter("A_log", count.log().repeat({inner, 1}));
    if (c.decay == "one") A_log = add_parameter("A_log", torch::zeros({1}));
    if (c.decay == "learnable")
      A_bias = add_parameter("A_bias", count + at::log(-at::expm1(-count)));
  }

  Projection input_projection() const override { return in_proj->projection(); }
  at::Tensor mix(const at::Tensor& projected, State& state) override {
    const auto xz = ops::split(projected, {inner, inner});
    const at::Tensor x = conv->forward(xz[0], state);
    const auto part = x_proj->forward(x).split_with_sizes(parts, -1);
    const at::Tensor dt = dt_proj->forward(part[0]);
    at::Tensor y;
    if (config.decay == "full" || config.decay == "learnable") {
      const at::Tensor A = config.decay == "full"
                               ? once_for_steps(state, [this] { return -A_log.exp(); })
                               : -at::softplus(wide(part[3]) + A_bias);
      std::tie(y, state["ssm"]) =
          ops::selective_scan(x, dt, A, part[1].unsqueeze(2), part[2].unsqueeze(2), D, xz[1],
                              dt_bias, /*delta_softplus=*/true, state.find("ssm"));
      return out_proj->forward(y);
    }
    const at::Tensor delta = at::softplus(wide(dt) + dt_bias);
    std::tie(y, state["ssm"]) = shared_decay(x, delta, part[1], part[2], state.find("ssm"));
    return out_proj->forward((y + x * D.to(x.scalar_type())) * at::silu(xz[1]));
  }

  // All channels and states decay alike, or not at all: linear attention with one head.
  std::tuple<at::Tensor, at::Tensor> shared_decay(const at::Tensor& x, const at::Tensor& delta,
                                                  const at::Tensor& B, const at::Tensor& C,
                                                  const std::optional<at::Tensor>& before) const {
    const at::Tensor q = C.unsqueeze(2);
    const at::Tensor k = B.unsqueeze(2);
    const at::Tensor v = (x * delta.to(x.scalar_type())).unsqueeze(2);
    auto [y, after] =
        config.decay == "none"
            ? ops::linear_attention(q, k, v, 1, before)
            : ops::simple_gla(q, k, v, -A_log.exp() * delta.mean(-1, true), 1, before);
    return {y.squeeze(2), after};
  }

  double mixing_flops(int64_t) const override {
    return double(inner) * double(9 * N + 2 * config.conv_width);
  }

  // 2: the projections start as in the official code. 1: N(0, 0.02), out_proj / √(2 num_layers).
  int numerics() const override { return 2; }

  Config config;
  int64_t inner;
  int64_t N;
  std::vector<int64_t> parts;  // of x_proj: δ, B, C and, where it is learnable, A
  std::shared_ptr<Linear> in_proj;
  std::shared_ptr<Linear> x_proj;
  std::shared_ptr<Linear> dt_proj;
  std::shared_ptr<Linear> out_proj;
  std::shared_ptr<ShortConv> conv;
  at::Tensor dt_bias;
  at::Tensor A_log;
  at::Tensor A_bias;
  at::Tensor D;
};

const RegisterMixer<Mamba1> registered(
    "mamba1",
    "S_t = exp(Δ_t A) ⊙ S_{t−1} + Δ_t x_t ⊗ B_t, y_t = S_t C_t + D x_t, "
    "gated by silu(z_t) [Gu & Dao 2023]",
    {{},
     {.state_size = 5, .expand = 1, .conv_width = 2, .dt_rank = 3},
     {.state_size = 4, .decay = "one"},
     {.state_size = 4, .conv_width = 0, .decay = "none"},
     {.state_size = 6, .expand = 1, .decay = "learnable"}});

}  // namespace
}  // namespace assay::nn
