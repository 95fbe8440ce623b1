// Based's linear attention: softmax attention's exponential cut after its second-order term. [Arora
// et al. 2024, §4]
//   s_tj = q_t·k_j / √K     w_tj = 1 + s + s²/2     y_t = Σ_{j≤t} w_tj v_j / (Σ_{j≤t} w_tj + eps)
//       out = W_o y
// q, k of `feature_dim` channels a head, v of d_model / H. The state has a fixed size: sums of
// the features' products.
#include <torch/torch.h>

#include <cmath>

#include "nn/layers.h"
#include "nn/mixer.h"
#include "ops/recurrence/taylor_exp/taylor_exp.h"

namespace assay::nn {
namespace {

struct TaylorAttention final : ProjectedMixer {
  struct Config {
    int64_t num_heads = 4;
    int64_t feature_dim = 16;
    double eps = 1e-12;
    void fields(auto&& field) {
      field("num_heads", num_heads, "heads; divides d_model");
      field("feature_dim", feature_dim, "channels of queries and keys per head");
      field("eps", eps, "added to the denominator");
    }
  };

  TaylorAttention(const Config& c, int64_t d_model)
      : config(c), K(c.num_heads * c.feature_dim), V(d_model) {
    head_width("taylor_attention", V, c.num_heads);
    if (c.feature_dim < 1)
      fail("taylor_attention: feature_dim = {} must be positive", c.feature_dim);
    qkv = add_linear("qkv", d_model, 2 * K + V);
    out_proj = add_linear("out_proj", V, d_model, {.role = Role::output});
  }

  Projection input_projection() const override { return qkv->projection(); }
  at::Tensor mix(const at::Tensor& projected, State& state) override {
    const auto part = projected.split_with_sizes({K, K, V}, -1);
    const auto heads = [&](int64_t i) { return split_heads(part[i], config.num_heads); };
    at::Tensor y;
    std::tie(y, state["S"]) = ops::taylor_exp_attention(
        heads(0), heads(1), heads(2), 1 / std::sqrt(double(config.feature_dim)),
        /*normalize=*/true, config.eps, state.find("S"));
    return out_proj->forward(y.flatten(2));
  }

  double mixing_flops(int64_t) const override {
    const double features = 1 + 1.5 * double(config.feature_dim) +
                            0.5 * double(config.feature_dim * config.feature_dim);
    return 4 * features * double(V + config.num_heads);
  }

  Config config;
  // of all heads
  int64_t K;
  int64_t V;
  std::shared_ptr<Linear> qkv;
  std::shared_ptr<Linear> out_proj;
};

const RegisterMixer<TaylorAttention> registered(
    "taylor_attention",
    "y_t = Σ w_tj v_j / Σ w_tj, w = 1 + s + s²/2, s = q_t·k_j / √K, j ≤ t [Based, Arora et al. "
    "2024]",
    {{.feature_dim = 4}, {.num_heads = 3, .feature_dim = 5, .eps = 1e-6}});

}  // namespace
}  // namespace assay::nn
