// Comba: a delta rule that reads the state with one key and writes it with another, and whose
// query is corrected by the key that it reads with. [Hu et al. 2025, arXiv 2506.02475]
//   q, k, v = silu(conv(W x))     p = σ(d) k     q ← q − D p     then q, k and p of unit length
//       β = σ(W_β x)     g = −exp(A_log) softplus(W_a x + b)
//   S_t = exp(g_t) S_{t−1} + k_t β_t (v_t − S_{t−1}ᵀ p_t)ᵀ     y_t = S_tᵀ q_t / √K
//   out = W_o (RMSNorm_head(y) ⊙ σ(W_z x))
// p reads the state before its decay, as in the kernels of flash-linear-attention; its recurrent
// naive function reads after it. Since p has unit length, σ(d) acts through q. The recurrence is
// RWKV-7's with w = g, a = −p and b = β k. The layer and its starting values are those of
// flash-linear-attention: d = D = 1, exp(A_log) uniform in [0, 16], softplus(b) log-uniform in
// [0.001, 0.1]. That code starts its convolution from N(0, 0.02): conv_std = 0.02.
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

struct Comba final : ProjectedMixer {
  struct Config {
    int64_t num_heads = 4;
    int64_t head_dim = 0;
    int64_t value_head_dim = 0;
    int64_t conv_width = 4;
    double initial_correction = 1;
    double conv_std = 0;
    double norm_eps = 1e-5;
    void fields(auto&& field) {
      field("num_heads", num_heads, "heads");
      field("head_dim", head_dim, "of queries and keys; 0: 3/4 d_model / num_heads");
      field("value_head_dim", value_head_dim, "of the values; 0: 2 head_dim");
      field("conv_width", conv_width, "taps of the convolution; 0: none");
      field("initial_correction", initial_correction,
            "where D starts; the authors take 0.02 for small models");
      field(
          "conv_std", conv_std,
          "standard deviation of the convolution's starting values; 0: uniform in ±1/√conv_width");
      field("norm_eps", norm_eps, "of the norm of each head");
    }
  };

  static Config expanded(Config c, int64_t d_model) {
    if (c.head_dim == 0) c.head_dim = head_width("comba", 3 * d_model / 4, c.num_heads);
    if (c.value_head_dim == 0) c.value_head_dim = 2 * c.head_dim;
    if (std::min({c.num_heads, c.head_dim, c.value_head_dim}) < 1)
      fail("comba: num_heads, head_dim and value_head_dim must be positive");
    return c;
  }

  Comba(const Config& c, int64_t d_model)
      : config(expanded(c, d_model)),
        K(config.num_heads * config.head_dim),
        V(config.num_heads * config.value_head_dim) {
    const int64_t heads = config.num_heads;
    in_proj = add_linear("in_proj", d_model, 2 * K + 2 * V + 2 * heads);
    conv = register_module("conv", std::make_shared<ShortConv>(2 * K + V, config.conv_width, false,
                                                               "silu", config.conv_std));
    norm = register_module(
        "norm", std::make_shared<Norm>("rmsnorm", config.value_head_dim, config.norm_eps));
    out_proj = add_linear("out_proj", V, d_model, {.role = Role::output});
    feedback = add_parameter("feedback", torch::ones({heads}));
    D = add_parameter("D", torch::full({heads}, config.initial_correction));
    A_log = add_parameter("A_log", torch::zeros({heads}), {.start = log_of_uniform(0, 16)});
    dt_bias = add_parameter("dt_bias", torch::zeros({heads}), {.start = log_uniform_steps()});
  }

  Projection input_projection() const override { return in_proj->projection(); }
  at::Tensor mix(const at::Tensor& projected, State& state) override {
    const int64_t H = config.num_heads;
    const auto heads = [&](const at::Tensor& t) { return split_heads(t, H); };
    const auto part = ops::split(projected, {2 * K + V, V, 2 * H});
    const auto qkv = conv->forward(part[0], state, {K, K, V});
    const auto dtype = projected.scalar_type();
    const at::Tensor key = heads(qkv[1]);
    const at::Tensor k = unit_length(key);
    const at::Tensor fed_back = key * feedback.sigmoid().to(dtype).unsqueeze(-1);
    const at::Tensor q = unit_length(heads(qkv[0]) - fed_back * D.to(dtype).unsqueeze(-1));
    const auto gates = wide(part[2]).chunk(2, -1);
    const at::Tensor rate = once_for_steps(state, [this] { return -A_log.exp(); });
    const at::Tensor g = (rate * at::softplus(gates[1] + dt_bias)).unsqueeze(-1).expand(k.sizes());
    const at::Tensor written = (k * gates[0].sigmoid().unsqueeze(-1)).to(dtype);
    at::Tensor y;
    std::tie(y, state["S"]) =
        ops::rwkv7(q, g, written, heads(qkv[2]), -unit_length(fed_back), written,
                   1 / std::sqrt(double(config.head_dim)), state.find("S"));
    return out_proj->forward(norm->forward_then_gate(y.flatten(2), part[1], "sigmoid"));
  }

  double mixing_flops(int64_t) const override {
    return 7.0 * double(config.head_dim * V) + double(2 * config.conv_width * (2 * K + V));
  }

  Config config;
  // of all heads
  int64_t K;
  int64_t V;
  std::shared_ptr<Linear> in_proj;
  std::shared_ptr<Linear> out_proj;
  std::shared_ptr<ShortConv> conv;
  std::shared_ptr<Norm> norm;
  at::Tensor feedback;
  at::Tensor D;
  at::Tensor A_log;
  at::Tensor dt_bias;
};

const RegisterMixer<Comba> registered(
    "comba",
    "S_t = exp(g_t) S_{t−1} + k_t β_t (v_t − S_{t−1}ᵀ p_t)ᵀ, y_t = S_tᵀ (q_t − D p_t) / √K, "
    "gated by σ(z_t) [Hu et al. 2025]",
    {{},
     {.num_heads = 3, .head_dim = 5, .value_head_dim = 7, .conv_width = 2},
     {.num_heads = 2, .conv_width = 0, .initial_correction = 0.02}});

}  // namespace
}  // namespace assay::nn
