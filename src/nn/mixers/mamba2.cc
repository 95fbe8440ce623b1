// Mamba-2's mixer: state space duality, a state that decays by one number a head. [Dao & Gu 2024,
// §7, Fig. 6]
//   z, xBC, dt = W_in h     x, B, C = silu(conv(xBC))     Δ = softplus(dt + b)
//   S_t = exp(Δ_t A) S_{t−1} + Δ_t x_t B_tᵀ     y_t = S_t C_t + D x_t
//       out = W_out RMSNorm_group(y ⊙ silu(z))
// Starting values as in state-spaces/mamba: −A uniform in [1, 16], D = 1, softplus(b) log-uniform
// in [0.001, 0.1], the matrices as torch's Linear starts, W_out divided by √(residual branches).
//
// Ablations [BC §3]: decay = "one": every head decays by exp(A mean_h Δ_t), with one A; "none": no
// decay. In both, Δ still scales what is written. conv_width = 0: no convolution. norm = false: no
// norm before W_out.
#include <torch/torch.h>

#include "nn/cache.h"
#include "nn/initial_values.h"
#include "nn/layers.h"
#include "nn/short_conv.h"
#include "ops/core/split.h"
#include "ops/recurrence/linear_attention/linear_attention.h"
#include "ops/recurrence/ssd/ssd.h"

namespace assay::nn {
namespace {

struct Mamba2 final : ProjectedMixer {
  struct Config {
    int64_t state_size = 128;
    int64_t expand = 2;
    int64_t head_dim = 64;
    int64_t num_groups = 1;
    int64_t conv_width = 4;
    std::string decay = "full";
    bool norm = true;
    double norm_eps = 1e-5;
    void fields(auto&& field) {
      field("state_size", state_size, "N, states per channel");
      field("expand", expand, "inner channels over d_model");
      field("head_dim", head_dim, "channels per head; divides expand · d_model");
      field("num_groups", num_groups, "groups of heads that share B and C; divides the heads");
      field("conv_width", conv_width, "taps of the convolution; 0: none");
      field("decay", decay, "full, one (shared by all heads) or none");
      field("norm", norm, "the norm of each group before the output projection");
      field("norm_eps", norm_eps, "of that norm");
    }
  };

  Mamba2(const Config& c, const Place& p)
      : config(c), inner(c.expand * p.d_model), groups(c.num_groups * c.state_size) {
    const int64_t d_model = p.d_model;
    if (c.state_size < 1) fail("mamba2: state_size = {} must be positive", c.state_size);
    if (c.expand < 1) fail("mamba2: expand = {} must be positive", c.expand);
    if (c.head_dim < 1 || inner % c.head_dim)
      fail("mamba2: head_dim = {} must be positive and divide expand · d_model = {}", c.head_dim,
           inner);
    num_heads = inner / c.head_dim;
    if (c.num_groups < 1 || num_heads % c.num_groups)
      fail("mamba2: num_groups = {} must be positive and divide the {} heads", c.num_groups,
           num_heads);
    one_of("mamba2", "decay", c.decay, {"full", "one", "none"});
    in_proj = add_linear("in_proj", d_model, 2 * inner + 2 * groups + num_heads,
                         {.start = uniform_by_width()});
    conv = register_module("conv",
                           std::make_shared<ShortConv>(inner + 2 * groups, c.conv_width, true));
    out_proj =
        add_linear("out_proj", inner, d_model, {.role = Role::output, .start = mamba_output(p)});
    if (c.norm)
      norm = register_module("norm",
                             std::make_shared<Norm>("rmsnorm", inner, c.norm_eps, c.num_groups));
    dt_bias = add_parameter("dt_bias", torch::zeros({num_heads}), {.start = log_uniform_steps()});
    D = add_parameter("D", torch::ones({num_heads}));
    if (c.decay != "none")
      A_log = add_parameter("A_log", torch::zeros({c.decay == "one" ? 1 : num_heads}),
                            {.start = log_of_uniform(1, 16)});
  }

  Projection input_projection() const override { return in_proj->projection(); }
  at::Tensor mix(const at::Tensor& projected, State& state) override {
    const auto part = ops::split(projected, {inner, inner + 2 * groups, num_heads});
    const auto xBC = conv->forward(part[1], state, {inner, groups, groups});
    const at::Tensor x = split_heads(xBC[0], num_heads);
    const at::Tensor B = split_heads(xBC[1], config.num_groups);
    const at::Tensor C = split_heads(xBC[2], config.num_groups);
    const at::Tensor y = recurrence(x, part[2], B, C, state).flatten(2);
    return out_proj->forward(norm ? norm->gate_then_forward(y, part[0]) : y * at::silu(part[0]));
  }

  at::Tensor recurrence(const at::Tensor& x, const at::Tensor& dt, const at::Tensor& B,
                        const at::Tensor& C, State& state) const {
    at::Tensor y;
    if (config.decay == "full") {
      std::tie(y, state["S"]) = ops::ssd(
          x, dt, once_for_steps(state, [this] { return -A_log.exp(); }), B, C, D, {}, dt_bias,
          /*dt_softplus=*/true, state.find("S"));
      return y;
    }
    const at::Tensor delta = at::softplus(wide(dt) + dt_bias);
    const at::Tensor written = x * delta.to(x.scalar_type()).unsqueeze(-1);
    if (config.decay == "none") {
      std::tie(y, state["S"]) = ops::linear_attention(C, B, written, 1, state.find("S"));
    } else {
      const at::Tensor g = (-A_log.exp() * delta.mean(-1, true)).expand(delta.sizes());
      std::tie(y, state["S"]) = ops::simple_gla(C, B, written, g, 1, state.find("S"));
    }
    return y + x * D.to(x.scalar_type()).unsqueeze(-1);
  }

  double mixing_flops(int64_t) const override {
    return double(inner) * double(5 * config.state_size) +
           double(2 * config.conv_width * (inner + 2 * groups));
  }

  // 2: the projections start as in the official code. 1: N(0, 0.02), out_proj / √(2 num_layers).
  int numerics() const override { return 2; }

  Config config;
  // `groups`: channels of B, and of C
  int64_t inner;
  int64_t groups;
  int64_t num_heads;
  std::shared_ptr<Linear> in_proj;
  std::shared_ptr<Linear> out_proj;
  std::shared_ptr<ShortConv> conv;
  std::shared_ptr<Norm> norm;
  at::Tensor dt_bias;
  at::Tensor D;
  at::Tensor A_log;
};

const RegisterMixer<Mamba2> registered(
    "mamba2",
    "S_t = exp(Δ_t A) S_{t−1} + Δ_t x_t B_tᵀ, y_t = S_t C_t + D x_t, "
    "norm(y ⊙ silu(z)) [Dao & Gu 2024]",
    {{.state_size = 16, .head_dim = 16},
     {.state_size = 5, .expand = 1, .head_dim = 8, .num_groups = 3, .conv_width = 2},
     {.state_size = 8, .head_dim = 24, .num_groups = 2, .decay = "one"},
     {.state_size = 8, .head_dim = 32, .conv_width = 0, .decay = "none", .norm = false}});

}  // namespace
}  // namespace assay::nn
