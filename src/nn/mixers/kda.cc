// Kimi Delta Attention: the gated delta rule with a decay per channel of the keys. [Kimi Linear
// 2025, eq. 1, §4]
//   q, k, v = silu(conv(W x)), q and k of unit length     β = σ(W_β x)
//       g = −exp(A_log) softplus(f),  or gate_bound σ(exp(A_log) f)     f = W_f2 W_f1 x + b
//   S' = diag(exp g_t) S_{t−1}     S_t = S' + k_t β_t (v_t − S'ᵀ k_t)ᵀ     y_t = S_tᵀ q_t / √K
//   out = W_o (RMSNorm_head(y) ⊙ σ(W_g2 W_g1 x + b_g))
// The recurrence is RWKV-7's with a = −exp(g) ⊙ k and b = β k. The layer is that of
// flash-linear-attention; transformers' kimi_linear has no b_g: gate_bias = false. Starting values
// as there: exp(A_log) uniform in [1, 16] (1 with gate_bound), softplus(b) log-uniform in [0.001,
// 0.1]. That code starts its convolution from N(0, 0.02): conv_std = 0.02.
#include <torch/torch.h>

#include <cmath>

#include "nn/cache.h"
#include "nn/initial_values.h"
#include "nn/layers.h"
#include "nn/short_conv.h"
#include "ops/core/split.h"
#include "ops/recurrence/delta_rule/delta_rule.h"
#include "ops/rowwise/delta_inputs/delta_inputs.h"

namespace assay::nn {
namespace {

struct KimiDeltaAttention final : ProjectedMixer {
  struct Config {
    int64_t num_heads = 4;
    int64_t head_dim = 0;
    int64_t value_head_dim = 0;
    int64_t gate_rank = 0;
    int64_t conv_width = 4;
    double conv_std = 0;
    double norm_eps = 1e-5;
    double gate_bound = 0;
    bool gate_bias = true;
    bool negative_eigenvalues = false;
    void fields(auto&& field) {
      field("num_heads", num_heads, "heads");
      field("head_dim", head_dim, "of queries and keys; 0: d_model / num_heads");
      field("value_head_dim", value_head_dim, "of the values; 0: head_dim");
      field("gate_rank", gate_rank, "rank of the decay and of the output gate; 0: value_head_dim");
      field("conv_width", conv_width, "taps of the convolution; 0: none");
      field(
          "conv_std", conv_std,
          "standard deviation of the convolution's starting values; 0: uniform in ±1/√conv_width");
      field("norm_eps", norm_eps, "of the norm of each head");
      field("gate_bound", gate_bound, "the lowest log decay, such as -5; 0: no bound");
      field("gate_bias", gate_bias, "a bias on the output gate");
      field("negative_eigenvalues", negative_eigenvalues, "β in (0, 2) instead of (0, 1)");
    }
  };

  static Config expanded(Config c, int64_t d_model) {
    if (c.head_dim == 0) c.head_dim = head_width("kda", d_model, c.num_heads);
    if (c.value_head_dim == 0) c.value_head_dim = c.head_dim;
    if (c.gate_rank == 0) c.gate_rank = c.value_head_dim;
    if (std::min({c.num_heads, c.head_dim, c.value_head_dim, c.gate_rank}) < 1)
      fail("kda: num_heads, head_dim, value_head_dim and gate_rank must be positive");
    if (!(c.gate_bound <= 0) || std::isinf(c.gate_bound))
      fail("kda: gate_bound = {} must be negative, or 0 for no bound", c.gate_bound);
    return c;
  }

  KimiDeltaAttention(const Config& c, int64_t d_model)
      : config(expanded(c, d_model)),
        K(config.num_heads * config.head_dim),
        V(config.num_heads * config.value_head_dim) {
    in_proj = add_linear("in_proj", d_model, 2 * K + V + 2 * config.gate_rank + config.num_heads);
    conv = register_module("conv", std::make_shared<ShortConv>(2 * K + V, config.conv_width, false,
                                                               "silu", config.conv_std));
    decay_proj = add_linear("decay_proj", config.gate_rank, K);
    gate_proj = add_linear("gate_proj", config.gate_rank, V, {.bias = config.gate_bias});
    norm = register_module(
        "norm", std::make_shared<Norm>("rmsnorm", config.value_head_dim, config.norm_eps));
    out_proj = add_linear("out_proj", V, d_model, {.role = Role::output});
    A_log = add_parameter("A_log", torch::zeros({config.num_heads}),
                          {.start = bounded() ? constant(0) : log_of_uniform(1, 16)});
    dt_bias = add_parameter("dt_bias", torch::zeros({K}), {.start = log_uniform_steps()});
  }

  Projection input_projection() const override { return in_proj->projection(); }
  at::Tensor mix(const at::Tensor& projected, State& state) override {
    const auto heads = [&](const at::Tensor& t) { return split_heads(t, config.num_heads); };
    const auto part =
        ops::split(projected, {2 * K + V, config.gate_rank, config.gate_rank, config.num_heads});
    const auto qkv = conv->forward(part[0], state, {K, K, V});
    at::Tensor beta = wide(part[3]).sigmoid();
    if (config.negative_eigenvalues) beta = 2 * beta;
    const at::Tensor rate = once_for_steps(state, [this] { return A_log.exp(); });
    const auto [g, q, written, removed] =
        ops::kda_inputs(qkv[0], qkv[1], decay_proj->forward(part[1]), beta, dt_bias, rate,
                        config.gate_bound, config.num_heads);
    const at::Tensor stored = heads(written);
    at::Tensor y;
    std::tie(y, state["S"]) =
        ops::rwkv7(heads(q), heads(g), stored, heads(qkv[2]), heads(removed), stored,
                   1 / std::sqrt(double(config.head_dim)), state.find("S"));
    return out_proj->forward(
        norm->forward_then_gate(y.flatten(2), gate_proj->forward(part[2]), "sigmoid"));
  }
  bool bounded() const { return config.gate_bound < 0; }

  double mixing_flops(int64_t) const override {
    return 7.0 * double(config.head_dim * V) + double(2 * config.conv_width * (2 * K + V));
  }

  Config config;
  // of all heads
  int64_t K;
  int64_t V;
  std::shared_ptr<Linear> in_proj;
  std::shared_ptr<Linear> decay_proj;
  std::shared_ptr<Linear> gate_proj;
  std::shared_ptr<Linear> out_proj;
  std::shared_ptr<ShortConv> conv;
  std::shared_ptr<Norm> norm;
  at::Tensor A_log;
  at::Tensor dt_bias;
};

const RegisterMixer<KimiDeltaAttention> registered(
    "kda",
    "S' = diag(exp g_t) S_{t−1}, S_t = S' + k_t β_t (v_t − S'ᵀ k_t)ᵀ, y_t = S_tᵀ q_t / √K, "
    "gated by σ(z_t) [Kimi Linear 2025]",
    {{},
     {.num_heads = 3,
      .head_dim = 5,
      .value_head_dim = 7,
      .gate_rank = 2,
      .conv_width = 2,
      .gate_bound = -5},
     {.num_heads = 2, .conv_width = 0, .gate_bias = false, .negative_eigenvalues = true}});

}  // namespace
}  // namespace assay::nn
