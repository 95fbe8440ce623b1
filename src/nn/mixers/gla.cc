// Gated linear attention: every key channel of the state decays at its own rate, read
// from the token.
//   S_t = diag(exp gk_t) S_{t−1} + k_t v_tᵀ     y_t = S_tᵀ q_t / √K
//       [Yang et al. 2023, §4.4]
//   gk = ln σ(W₂ W₁ x + b) / 16                 out = W_o (RMSNorm_head(y) ⊙ silu(W_g x))
// As flash-linear-attention has it: no convolution, no positions; the paper's LayerNorm is
// an RMSNorm there.
#include <torch/torch.h>

#include <cmath>

#include "nn/layers.h"
#include "nn/mixer.h"
#include "ops/core/split.h"
#include "ops/recurrence/linear_attention/linear_attention.h"

namespace assay::nn {
namespace {

struct GatedLinearAttention final : Mixer {
  struct Config {
    int64_t num_heads = 4;
    double expand_k = 0.5;
    double expand_v = 1;
    int64_t gate_rank = 16;
    double gate_normalizer = 16;
    double norm_eps = 1e-5;
    void fields(auto&& field) {
      field("num_heads", num_heads, "heads");
      field("expand_k", expand_k, "width of the keys over d_model");
      field("expand_v", expand_v, "width of the values over d_model");
      field("gate_rank", gate_rank, "rank of the decay's projection");
      field("gate_normalizer", gate_normalizer, "log decays are divided by it");
      field("norm_eps", norm_eps, "of the norm of each head");
    }
  };

  GatedLinearAttention(const Config& c, int64_t d_model)
      : config(c),
        K(std::llround(c.expand_k * double(d_model))),
        V(std::llround(c.expand_v * double(d_model))) {
    head_width("gla", K, c.num_heads);
    if (c.gate_rank < 1 || !(c.gate_normalizer > 0))
      fail("gla: gate_rank and gate_normalizer must be positive");
    qkvg_proj = add_linear("qkvg_proj", d_model, 2 * K + 2 * V);
    gk = register_module("gk", std::make_shared<LowRank>(d_model, c.gate_rank, K, true));
    norm = register_module(
        "norm", std::make_shared<Norm>("rmsnorm", head_width("gla", V, c.num_heads), c.norm_eps));
    out_proj = add_linear("out_proj", V, d_model, {.role = Role::output});
  }

  at::Tensor forward(const at::Tensor& x, State& state) override {
    const auto heads = [&](const at::Tensor& t) { return split_heads(t, config.num_heads); };
    const auto part = ops::split(qkvg_proj->forward(x), {K, K, V, V});
    const at::Tensor decay = at::log_sigmoid(wide(gk->forward(x))) / config.gate_normalizer;
    at::Tensor y;
    std::tie(y, state["S"]) =
        ops::gla(heads(part[0]), heads(part[1]), heads(part[2]), heads(decay),
                 std::sqrt(double(config.num_heads) / double(K)), state.find("S"));
    return out_proj->forward(norm->forward_then_gate(y.flatten(2), part[3]));
  }

  double mixing_flops(int64_t) const override {
    return 5.0 * double(K * V) / double(config.num_heads);
  }

  Config config;
  // of all heads
  int64_t K;
  int64_t V;
  std::shared_ptr<Linear> qkvg_proj;
  std::shared_ptr<Linear> out_proj;
  std::shared_ptr<LowRank> gk;
  std::shared_ptr<Norm> norm;
};

const RegisterMixer<GatedLinearAttention> registered(
    "gla",
    "S_t = diag(exp gk_t) S_{t−1} + k_t v_tᵀ, y_t = S_tᵀ q_t / √K, "
    "gated by silu(W_g x) [Yang et al. 2023]",
    {{},
     {.num_heads = 3, .expand_k = 0.25, .expand_v = 1.5, .gate_rank = 5, .gate_normalizer = 4}});

}  // namespace
}  // namespace assay::nn
