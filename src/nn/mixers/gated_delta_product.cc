// Gated DeltaProduct: the gated delta rule with several keys, values and β per token, so that a
// step of the state is a product of Householder-like matrices. [Siems et al. 2025, arXiv
// 2502.10297]
//   q, k_j, v_j = silu(conv(W x)) for j < n, q and k_j of unit length     β_j = 2 σ(W_β x)
//       g = −exp(A_log) softplus(W_a x + b)
//   S ← exp(g_t) S, then S ← S + k_j β_j (v_j − Sᵀ k_j)ᵀ for j = 0 … n − 1     y_t = Sᵀ q_t / √K
//   out = W_o (RMSNorm_head(y) ⊙ silu(W_z x))
// Computed as gated_delta_rule over n steps per token, of which the first decays and the last is
// read. The layer and its starting values are those of flash-linear-attention: exp(A_log) uniform
// in [0, 16], softplus(b) log-uniform in [0.001, 0.1]. That code starts its convolution from N(0,
// 0.02): conv_std = 0.02.
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

struct GatedDeltaProduct final : ProjectedMixer {
  struct Config {
    int64_t num_steps = 2;
    int64_t num_heads = 4;
    int64_t num_key_heads = 0;
    int64_t head_dim = 0;
    int64_t value_head_dim = 0;
    int64_t conv_width = 4;
    bool decay = true;
    bool negative_eigenvalues = true;
    double conv_std = 0;
    double norm_eps = 1e-5;
    void fields(auto&& field) {
      field("num_steps", num_steps, "n, steps of the delta rule per token");
      field("num_heads", num_heads, "heads of the values, and of the state");
      field("num_key_heads", num_key_heads,
            "heads of queries and keys; divides num_heads; 0: num_heads");
      field("head_dim", head_dim, "of queries and keys; 0: 3/4 d_model / num_heads");
      field("value_head_dim", value_head_dim, "of the values; 0: 2 head_dim");
      field("conv_width", conv_width, "taps of the convolution; 0: none");
      field("decay", decay, "false: g = 0");
      field("negative_eigenvalues", negative_eigenvalues, "false: β in (0, 1) instead of (0, 2)");
      field("conv_std", conv_std,
            "deviation of the convolution's starting values; 0: uniform in ±1/√conv_width");
      field("norm_eps", norm_eps, "of the norm of each head");
    }
  };

  static Config expanded(Config c, int64_t d_model) {
    const char* name = "gated_delta_product";
    if (c.num_key_heads == 0) c.num_key_heads = c.num_heads;
    if (c.head_dim == 0) c.head_dim = head_width(name, 3 * d_model / 4, c.num_heads);
    if (c.value_head_dim == 0) c.value_head_dim = 2 * c.head_dim;
    if (c.num_steps < 1) fail("{}: num_steps = {} must be positive", name, c.num_steps);
    if (c.num_key_heads < 1 || c.num_heads % c.num_key_heads)
      fail("{}: num_key_heads = {} must be positive and divide num_heads = {}", name,
           c.num_key_heads, c.num_heads);
    if (std::min({c.num_heads, c.head_dim, c.value_head_dim}) < 1)
      fail("{}: num_heads, head_dim and value_head_dim must be positive", name);
    return c;
  }

  GatedDeltaProduct(const Config& c, int64_t d_model)
      : config(expanded(c, d_model)),
        K(config.num_key_heads * config.head_dim),
        V(config.num_heads * config.value_head_dim),
        mixed(K + config.num_steps * (K + V)) {
    const int64_t heads = config.num_heads;
    const int64_t n = config.num_steps;
    in_proj = add_linear("in_proj", d_model, mixed + V + n * heads + (config.decay ? heads : 0));
    conv = register_module("conv", std::make_shared<ShortConv>(mixed, config.conv_width, false,
                                                               "silu", config.conv_std));
    norm = register_module(
        "norm", std::make_shared<Norm>("rmsnorm", config.value_head_dim, config.norm_eps));
    out_proj = add_linear("out_proj", V, d_model, {.role = Role::output});
    if (!config.decay) return;
    A_log = add_parameter("A_log", torch::zeros({heads}), {.start = log_of_uniform(0, 16)});
    dt_bias = add_parameter("dt_bias", torch::zeros({heads}), {.start = log_uniform_steps()});
  }

  Projection input_projection() const override { return in_proj->projection(); }
  at::Tensor mix(const at::Tensor& projected, State& state) override {
    const int64_t heads = config.num_heads;
    const int64_t n = config.num_steps;
    const auto part = ops::split(projected, {mixed, V, projected.size(2) - mixed - V});
    const auto qkv = conv->forward(part[0], state, {K, n * K, n * V});
    const auto unit = [&](const at::Tensor& t, int64_t parts) {
      return ops::unit_length(t, 1e-6, parts).unflatten(-1, {parts, -1});
    };
    // [B, T, n · ·, D] → [B, T · n, ·, D]
    const auto steps = [&](const at::Tensor& t) { return t.unflatten(2, {n, -1}).flatten(1, 2); };
    const at::Tensor q = at::constant_pad_nd(unit(qkv[0], config.num_key_heads).unsqueeze(2),
                                             {0, 0, 0, 0, n - 1, 0});
    const auto gates = wide(part[2]).split_with_sizes({n * heads, part[2].size(2) - n * heads}, -1);
    const double factor = config.negative_eigenvalues ? 2 : 1;
    const at::Tensor beta = factor * steps(gates[0].sigmoid());
    const at::Tensor k = steps(unit(qkv[1], n * config.num_key_heads));
    const at::Tensor v = steps(qkv[2].unflatten(-1, {n * heads, -1}));
    const double scale = 1 / std::sqrt(double(config.head_dim));
    at::Tensor y;
    if (config.decay) {
      const at::Tensor rate = once_for_steps(state, [this] { return -A_log.exp(); });
      const at::Tensor g = rate * at::softplus(gates[1] + dt_bias);
      const at::Tensor of_steps = at::constant_pad_nd(g.unsqueeze(2), {0, 0, 0, n - 1});
      std::tie(y, state["S"]) = ops::gated_delta_rule(q.flatten(1, 2), k, v, of_steps.flatten(1, 2),
                                                      beta, scale, state.find("S"));
    } else {
      std::tie(y, state["S"]) =
          ops::delta_rule(q.flatten(1, 2), k, v, beta, scale, state.find("S"));
    }
    const at::Tensor read = y.unflatten(1, {-1, n}).select(2, n - 1);
    return out_proj->forward(norm->forward_then_gate(read.flatten(2), part[1]));
  }

  double mixing_flops(int64_t) const override {
    return double(4 * config.num_steps + 3) * double(config.head_dim * V) +
           double(2 * config.conv_width * mixed);
  }

  Config config;
  int64_t K;      // channels of the keys of all heads, in one step
  int64_t V;      // of the values
  int64_t mixed;  // channels of the convolution
  std::shared_ptr<Linear> in_proj;
  std::shared_ptr<Linear> out_proj;
  std::shared_ptr<ShortConv> conv;
  std::shared_ptr<Norm> norm;
  // undefined without a decay
  at::Tensor A_log;
  at::Tensor dt_bias;
};

const RegisterMixer<GatedDeltaProduct> registered(
    "gated_delta_product",
    "S ← exp(g_t) S, S ← S + k_j β_j (v_j − Sᵀ k_j)ᵀ for j < n, y_t = Sᵀ q_t / √K, "
    "gated by silu(z_t) [Siems et al. 2025]",
    {{},
     {.num_steps = 3, .num_heads = 6, .num_key_heads = 2, .head_dim = 5, .value_head_dim = 7},
     {.num_steps = 1, .num_heads = 3, .conv_width = 2, .negative_eigenvalues = false},
     {.num_heads = 3, .conv_width = 0, .decay = false}});

}  // namespace
}  // namespace assay::nn
