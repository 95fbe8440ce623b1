// Retention: linear attention whose state decays by one constant per head. [RetNet, Sun et al.
// 2023, eq. 5–8]
//   S_t = γ_h S_{t−1} + k_t v_tᵀ     y_t = S_tᵀ q_t / √K     γ_h = 1 − 2^(−5−h)
//       q, k rotated by their position
//   out = W_o (RMSNorm_head(y) ⊙ silu(W_g x))
// As flash-linear-attention has it: the norm carries a weight; the rotation decays nothing (the
// paper's xPos does).
#include <torch/torch.h>

#include <cmath>

#include "nn/layers.h"
#include "nn/mixer.h"
#include "ops/attention/rotary_qkv/rotary_qkv.h"
#include "ops/core/split.h"
#include "ops/recurrence/linear_attention/linear_attention.h"

namespace assay::nn {
namespace {

struct Retention final : ProjectedMixer {
  struct Config {
    int64_t num_heads = 4;
    double expand_v = 2;
    double rope_base = 10000;
    double norm_eps = 1e-5;
    void fields(auto&& field) {
      field("num_heads", num_heads, "heads; divides d_model into even parts");
      field("expand_v", expand_v, "width of the values over d_model");
      field("rope_base", rope_base, "base of the rotary frequencies");
      field("norm_eps", norm_eps, "of the norm of each head");
    }
  };

  Retention(const Config& c, int64_t d_model)
      : config(c),
        K(d_model),
        V(std::llround(c.expand_v * double(d_model))),
        rotary(head_width("retention", K, c.num_heads), c.rope_base) {
    if (K / c.num_heads % 2)
      fail("retention: heads of {} channels cannot be rotated; they must be even", K / c.num_heads);
    qkvg_proj = add_linear("qkvg_proj", d_model, 2 * K + 2 * V);
    norm = register_module(
        "norm",
        std::make_shared<Norm>("rmsnorm", head_width("retention", V, c.num_heads), c.norm_eps));
    out_proj = add_linear("out_proj", V, d_model, {.role = Role::output});
    log_decay = register_buffer("log_decay",
                                at::log1p(-at::exp2(-5 - at::arange(c.num_heads, at::kDouble))));
  }

  Projection input_projection() const override { return qkvg_proj->projection(); }
  at::Tensor mix(const at::Tensor& projected, State& state) override {
    const int64_t position = state.advance(projected.size(1));
    const auto part = ops::split(projected, {2 * K, V, V});
    const auto [q, k] = rotated(split_heads(part[0], 2 * config.num_heads), position, state);
    const at::Tensor g = log_decay.to(at::promote_types(projected.scalar_type(), at::kFloat))
                             .expand({projected.size(0), projected.size(1), config.num_heads});
    at::Tensor y;
    std::tie(y, state["S"]) =
        ops::simple_gla(q, k, split_heads(part[1], config.num_heads), g,
                        std::sqrt(double(config.num_heads) / double(K)), state.find("S"));
    return out_proj->forward(norm->forward_then_gate(y.flatten(2), part[2]));
  }

  // q and k [B, T, H, D] of qk [B, T, 2 H, D]. Rows at positions of their own lie along time.
  std::array<at::Tensor, 2> rotated(const at::Tensor& qk, int64_t position, State& state) const {
    const bool own = !state.context.rows.empty();
    const at::Tensor rows = own ? qk.transpose(0, 1) : qk;
    const auto [cos, sin] = rotary.angles(rows, position, state);
    auto parts = ops::rotary_qk(rows, config.num_heads, cos, sin);
    if (own)
      for (at::Tensor& part : parts) part = part.transpose(0, 1);
    return parts;
  }

  double mixing_flops(int64_t) const override {
    return 5.0 * double(K * V) / double(config.num_heads);
  }

  Config config;
  // of all heads
  int64_t K;
  int64_t V;
  Rotary rotary;
  std::shared_ptr<Linear> qkvg_proj;
  std::shared_ptr<Linear> out_proj;
  std::shared_ptr<Norm> norm;
  at::Tensor log_decay;  // ln γ [H]
};

const RegisterMixer<Retention> registered(
    "retention",
    "S_t = γ_h S_{t−1} + k_t v_tᵀ, y_t = S_tᵀ q_t / √K, γ_h = 1 − 2^(−5−h), "
    "q and k rotated [RetNet, Sun et al. 2023]",
    {{}, {.num_heads = 3, .expand_v = 1, .rope_base = 500}});

}  // namespace
}  // namespace assay::nn
