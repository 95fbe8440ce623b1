// Gated DeltaNet: the delta rule on a state that decays first. [Yang et al. 2025, eq. 10]
//   q, k, v = silu(conv(W x)), q and k of unit length     β = σ(W_β x)
//       g = −exp(A_log) softplus(W_a x + b)
//   S' = exp(g_t) S_{t−1}     S_t = S' + k_t β_t (v_t − S'ᵀ k_t)ᵀ          y_t = S_tᵀ q_t / √K
//   out = W_o (RMSNorm_head(y) ⊙ silu(W_z x))
// As flash-linear-attention and Qwen3-Next have it: each value head has a β and g; several may
// share a key head. Starting values as there: exp(A_log) uniform in [0, 16], softplus(b)
// log-uniform in [0.001, 0.1]. The authors' own code (NVlabs) leaves the convolution at torch's
// values. flash-linear-attention starts it from N(0, 0.02) and gives the norm eps 1e-6: conv_std =
// 0.02, norm_eps = 1e-6.
#include <torch/torch.h>

#include <cmath>

#include "nn/cache.h"
#include "nn/initial_values.h"
#include "nn/layers.h"
#include "nn/short_conv.h"
#include "ops/core/split.h"
#include "ops/recurrence/delta_rule/delta_rule.h"
#include "ops/rowwise/unit_length/unit_length.h"

namespace assay::nn {
namespace {

struct GatedDeltaNet final : Mixer {
  struct Config {
    int64_t num_heads = 4;
    int64_t num_key_heads = 0;
    int64_t head_dim = 0;
    int64_t value_head_dim = 0;
    int64_t conv_width = 4;
    double conv_std = 0;
    double norm_eps = 1e-5;
    bool negative_eigenvalues = false;
    void fields(auto&& field) {
      field("num_heads", num_heads, "heads of the values, and of the state");
      field("num_key_heads", num_key_heads,
            "heads of queries and keys; divides num_heads; 0: num_heads");
      field("head_dim", head_dim, "of queries and keys; 0: 3/4 d_model / num_heads");
      field("value_head_dim", value_head_dim, "of the values; 0: 2 head_dim");
      field("conv_width", conv_width, "taps of the convolution; 0: none");
      field(
          "conv_std", conv_std,
          "standard deviation of the convolution's starting values; 0: uniform in ±1/√conv_width");
      field("norm_eps", norm_eps, "of the norm of each head");
      field("negative_eigenvalues", negative_eigenvalues, "β in (0, 2) instead of (0, 1)");
    }
  };

  static Config expanded(Config c, int64_t d_model) {
    if (c.num_key_heads == 0) c.num_key_heads = c.num_heads;
    if (c.head_dim == 0) c.head_dim = head_width("gated_delta_net", 3 * d_model / 4, c.num_heads);
    if (c.value_head_dim == 0) c.value_head_dim = 2 * c.head_dim;
    if (c.num_heads < 1) fail("gated_delta_net: num_heads = {} must be positive", c.num_heads);
    if (c.num_key_heads < 1 || c.num_heads % c.num_key_heads)
      fail("gated_delta_net: num_key_heads = {} must be positive and divide num_heads = {}",
           c.num_key_heads, c.num_heads);
    if (c.head_dim < 1 || c.value_head_dim < 1)
      fail("gated_delta_net: head_dim and value_head_dim must be positive");
    return c;
  }

  GatedDeltaNet(const Config& c, int64_t d_model)
      : config(expanded(c, d_model)),
        K(config.num_key_heads * config.head_dim),
        V(config.num_heads * config.value_head_dim) {
    qkvz_proj = add_linear("qkvz_proj", d_model, 2 * K + 2 * V);
    ba_proj = add_linear("ba_proj", d_model, 2 * config.num_heads);
    conv = register_module("conv", std::make_shared<ShortConv>(2 * K + V, config.conv_width, false,
                                                               "silu", config.conv_std));
    norm = register_module(
        "norm", std::make_shared<Norm>("rmsnorm", config.value_head_dim, config.norm_eps));
    out_proj = add_linear("out_proj", V, d_model, {.role = Role::output});
    A_log =
        add_parameter("A_log", torch::zeros({config.num_heads}), {.start = log_of_uniform(0, 16)});
    dt_bias =
        add_parameter("dt_bias", torch::zeros({config.num_heads}), {.start = log_uniform_steps()});
  }

  at::Tensor forward(const at::Tensor& x, State& state) override {
    const auto qkv_z = ops::split(qkvz_proj->forward(x), {2 * K + V, V});
    const auto part = conv->forward(qkv_z[0], state, {K, K, V});
    const auto keys = [&](const at::Tensor& t) {
      return split_heads(ops::unit_length(t, 1e-6, config.num_key_heads), config.num_key_heads);
    };
    const auto ba = wide(ba_proj->forward(x)).chunk(2, -1);
    const at::Tensor A = once_for_steps(state, [this] { return -A_log.exp(); });
    const at::Tensor g = A * at::softplus(ba[1] + dt_bias);
    at::Tensor beta = ba[0].sigmoid();
    if (config.negative_eigenvalues) beta = 2 * beta;
    at::Tensor y;
    std::tie(y, state["S"]) =
        ops::gated_delta_rule(keys(part[0]), keys(part[1]), split_heads(part[2], config.num_heads),
                              g, beta, 1 / std::sqrt(double(config.head_dim)), state.find("S"));
    return out_proj->forward(norm->forward_then_gate(y.flatten(2), qkv_z[1]));
  }

  double mixing_flops(int64_t) const override {
    return 7.0 * double(config.head_dim * V) + double(2 * config.conv_width * (2 * K + V));
  }

  Config config;
  // of all heads
  int64_t K;
  int64_t V;
  std::shared_ptr<Linear> qkvz_proj;
  std::shared_ptr<Linear> ba_proj;
  std::shared_ptr<Linear> out_proj;
  std::shared_ptr<ShortConv> conv;
  std::shared_ptr<Norm> norm;
  at::Tensor A_log;
  at::Tensor dt_bias;
};

const RegisterMixer<GatedDeltaNet> registered(
    "gated_delta_net",
    "S' = exp(g_t) S_{t−1}, S_t = S' + k_t β_t (v_t − S'ᵀ k_t)ᵀ, y_t = S_tᵀ q_t / √K, "
    "gated by silu(z_t) [Yang et al. "
    "2025]",
    {{},
     {.num_heads = 6, .num_key_heads = 2, .head_dim = 5, .value_head_dim = 7, .conv_width = 2},
     {.num_heads = 3, .conv_width = 0, .negative_eigenvalues = true}});

}  // namespace
}  // namespace assay::nn
