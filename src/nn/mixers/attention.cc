// Softmax attention, full or over a window, with rotary or no positions and optional QK-norm.
//   q, k, v = W x; q, k ← norm(rotary(q), rotary(k)); out = W_o attention(q, k, v)              [Vaswani 2017; RoFormer]
// QK-norm: q, k divided by their length a head; the scale is learned a head, starting at √D.   [Henry 2020, eq. 6]
#include <torch/torch.h>

#include <cmath>

#include "nn/attention.h"
#include "nn/layers.h"
#include "nn/mixer.h"
#include "ops/rotary_qkv/rotary_qkv.h"

namespace assay::nn {
namespace {

struct Attention final : Mixer {
  struct Config {
    int64_t num_heads = 4, num_kv_heads = 0, head_dim = 0, window = -1;
    std::string position = "rope";
    double rope_base = 10000;
    bool qk_norm = false, bias = false;
    void fields(auto&& field) {
      field("num_heads", num_heads, "query heads");
      field("num_kv_heads", num_kv_heads, "key and value heads; divides num_heads; 0: num_heads");
      field("head_dim", head_dim, "0: d_model / num_heads");
      field("window", window, "positions seen, the own one included; -1: all");
      field("position", position, "rope or none");
      field("rope_base", rope_base, "base of the rotary frequencies");
      field("qk_norm", qk_norm, "unit-length queries and keys, a learned scale per head");
      field("bias", bias, "biases on the projections");
    }
  };

  Attention(Config c, int64_t d_model) : config(expanded(c, d_model)), rotary(config.head_dim, config.rope_base) {
    const int64_t inner = config.num_heads * config.head_dim, kv = config.num_kv_heads * config.head_dim;
    qkv = register_module("qkv", std::make_shared<Linear>(d_model, inner + 2 * kv, config.bias));
    out_proj = register_module("out_proj", std::make_shared<Linear>(inner, d_model, config.bias));
    if (config.qk_norm)
      scale = register_parameter("scale", torch::full({config.num_heads}, std::sqrt(double(config.head_dim))));
  }

  static Config expanded(Config c, int64_t d_model) {
    if (c.num_heads < 1 || (c.head_dim == 0 && d_model % c.num_heads))
      fail("attention: num_heads = {} must be positive and divide d_model = {}", c.num_heads, d_model);
    if (c.num_kv_heads == 0) c.num_kv_heads = c.num_heads;
    if (c.num_kv_heads < 1 || c.num_heads % c.num_kv_heads)
      fail("attention: num_kv_heads = {} must divide num_heads = {}", c.num_kv_heads, c.num_heads);
    if (c.head_dim == 0) c.head_dim = d_model / c.num_heads;
    if (c.head_dim < 0 || (c.position == "rope" && c.head_dim % 2)) fail("attention: rope needs an even head_dim, got {}", c.head_dim);
    if (c.window == 0 || c.window < -1) fail("attention: window = {} must be positive, or -1 for all positions", c.window);
    if (c.position != "rope" && c.position != "none") fail("attention: position = '{}' must be rope or none", c.position);
    return c;
  }

  at::Tensor forward(const at::Tensor& x, State& state) override {
    const int64_t position = state.find("position").value_or(at::zeros({}, at::kLong)).item<int64_t>();
    auto [q, k, v] = project(x, position);
    double softmax_scale = 1 / std::sqrt(double(config.head_dim));
    if (config.qk_norm) {
      q = unit(q) * scale.to(q.scalar_type()).unsqueeze(-1), k = unit(k);
      softmax_scale = 1;
    }
    state["position"] = at::full({}, position + x.size(1), at::kLong);
    if (const auto past = state.find("k")) k = at::cat({*past, k}, 1), v = at::cat({*state.find("v"), v}, 1);
    const int64_t kept = config.window < 0 ? k.size(1) : std::min(k.size(1), config.window - 1);
    state["k"] = k.slice(1, k.size(1) - kept), state["v"] = v.slice(1, v.size(1) - kept);
    return out_proj->forward(causal_attention(q, k, v, config.window, softmax_scale).flatten(2));
  }

  // q [B, T, H, D], k and v [B, T, Hk, D]; the first of the T positions is `offset`.
  std::array<at::Tensor, 3> project(const at::Tensor& x, int64_t offset) const {
    const int64_t heads = config.num_heads, kv_heads = config.num_kv_heads;
    const at::Tensor all = qkv->forward(x).unflatten(-1, {heads + 2 * kv_heads, config.head_dim});
    if (config.position == "rope") {
      const auto [cos, sin] = rotary.angles(x, offset);
      return ops::rotary_qkv(all, kv_heads, cos, sin);
    }
    const auto parts = all.split_with_sizes({heads, kv_heads, kv_heads}, 2);
    return {parts[0], parts[1], parts[2]};
  }

  static at::Tensor unit(const at::Tensor& x) {
    const at::Tensor wide = x.to(at::promote_types(x.scalar_type(), at::kFloat));
    return x * at::rsqrt(wide.square().sum(-1, true) + 1e-6).to(x.scalar_type());
  }

  double mixing_flops(int64_t time) const override {
    const double window = config.window < 0 ? double(time) : double(std::min(config.window, time));
    return 4.0 * double(config.num_heads * config.head_dim) * (window - window * (window - 1) / (2.0 * double(time)));
  }

  Config config;
  Rotary rotary;
  std::shared_ptr<Linear> qkv, out_proj;
  at::Tensor scale;
};

const RegisterMixer<Attention> registered(
    "attention", "out_t = Σ_j softmax_j(q_t·k_j/√D) v_j over j ≤ t, or the last `window` positions [Vaswani 2017]",
    {{}, {.num_heads = 6, .num_kv_heads = 2}, {.window = 16}, {.window = 7, .position = "none"}, {.qk_norm = true, .bias = true}});

}  // namespace
}  // namespace assay::nn
