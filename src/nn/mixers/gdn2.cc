// Gated DeltaNet-2: Kimi Delta Attention whose removal and storage have a gate per channel each.
// [Gated DeltaNet-2, arXiv 2605.22791]
//   q, k, v = silu(conv(W x)), q and k of unit length     b = σ(W_b x) [K]     w = σ(W_w x) [V]
//       g = −exp(A_log) softplus(W_f2 W_f1 x + b_f)
//   S' = diag(exp g_t) S_{t−1}     S_t = S' + k_t (w_t ⊙ v_t − S'ᵀ (b_t ⊙ k_t))ᵀ
//       y_t = S_tᵀ q_t / √K
//   out = W_o (RMSNorm_head(y) ⊙ σ(W_g2 W_g1 x + b_g))
// With b = w = β it is kda. The recurrence is RWKV-7's with a = −exp(g) ⊙ b ⊙ k and b = k. The
// layer and its starting values are those of flash-linear-attention: exp(A_log) uniform in [1, 16],
// softplus(b_f) log-uniform in [0.001, 0.1]. That code starts its convolution from N(0, 0.02):
// conv_std = 0.02.
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

struct GatedDeltaNet2 final : ProjectedMixer {
  struct Config {
    int64_t num_heads = 4;
    int64_t head_dim = 0;
    int64_t value_head_dim = 0;
    int64_t gate_rank = 0;
    int64_t conv_width = 4;
    double conv_std = 0;
    double norm_eps = 1e-5;
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
      field("negative_eigenvalues", negative_eigenvalues, "b in (0, 2) instead of (0, 1)");
    }
  };

  static Config expanded(Config c, int64_t d_model) {
    if (c.head_dim == 0) c.head_dim = head_width("gdn2", d_model, c.num_heads);
    if (c.value_head_dim == 0) c.value_head_dim = c.head_dim;
    if (c.gate_rank == 0) c.gate_rank = c.value_head_dim;
    if (std::min({c.num_heads, c.head_dim, c.value_head_dim, c.gate_rank}) < 1)
      fail("gdn2: num_heads, head_dim, value_head_dim and gate_rank must be positive");
    return c;
  }

  GatedDeltaNet2(const Config& c, int64_t d_model)
      : config(expanded(c, d_model)),
        K(config.num_heads * config.head_dim),
        V(config.num_heads * config.value_head_dim) {
    in_proj = add_linear("in_proj", d_model, 3 * K + 2 * V + 2 * config.gate_rank);
    conv = register_module("conv", std::make_shared<ShortConv>(2 * K + V, config.conv_width, false,
                                                               "silu", config.conv_std));
    decay_proj = add_linear("decay_proj", config.gate_rank, K);
    gate_proj = add_linear("gate_proj", config.gate_rank, V, {.bias = true});
    norm = register_module(
        "norm", std::make_shared<Norm>("rmsnorm", config.value_head_dim, config.norm_eps));
    out_proj = add_linear("out_proj", V, d_model, {.role = Role::output});
    A_log =
        add_parameter("A_log", torch::zeros({config.num_heads}), {.start = log_of_uniform(1, 16)});
    dt_bias = add_parameter("dt_bias", torch::zeros({K}), {.start = log_uniform_steps()});
  }

  Projection input_projection() const override { return in_proj->projection(); }
  at::Tensor mix(const at::Tensor& projected, State& state) override {
    const auto heads = [&](const at::Tensor& t) { return split_heads(t, config.num_heads); };
    const auto part = ops::split(projected, {2 * K + V, K, V, config.gate_rank, config.gate_rank});
    const auto qkv = conv->forward(part[0], state, {K, K, V});
    const at::Tensor rate = once_for_steps(state, [this] { return A_log.exp(); });
    const auto [g, q, written, removed] =
        ops::gdn2_inputs(qkv[0], qkv[1], decay_proj->forward(part[3]), part[1], dt_bias, rate,
                         config.negative_eigenvalues ? 2 : 1, config.num_heads);
    const at::Tensor stored = heads(written);
    const at::Tensor v = heads(qkv[2] * part[2].sigmoid());
    at::Tensor y;
    std::tie(y, state["S"]) = ops::rwkv7(heads(q), heads(g), stored, v, heads(removed), stored,
                                         1 / std::sqrt(double(config.head_dim)), state.find("S"));
    return out_proj->forward(
        norm->forward_then_gate(y.flatten(2), gate_proj->forward(part[4]), "sigmoid"));
  }

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

const RegisterMixer<GatedDeltaNet2> registered(
    "gdn2",
    "S' = diag(exp g_t) S_{t−1}, S_t = S' + k_t (w_t ⊙ v_t − S'ᵀ (b_t ⊙ k_t))ᵀ, "
    "y_t = S_tᵀ q_t / √K, gated by σ(z_t) [arXiv 2605.22791]",
    {{},
     {.num_heads = 3, .head_dim = 5, .value_head_dim = 7, .gate_rank = 2, .conv_width = 2},
     {.num_heads = 2, .conv_width = 0, .negative_eigenvalues = true}});

}  // namespace
}  // namespace assay::nn
