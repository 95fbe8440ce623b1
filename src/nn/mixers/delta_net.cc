// DeltaNet: the state forgets what it held under a key before it stores the new value. [Yang et
// al. 2024, §3]
//   q, k, v = silu(conv(W x)), q and k of unit length     β = σ(W_β x)
//   S_t = S_{t−1} + k_t β_t (v_t − S_{t−1}ᵀ k_t)ᵀ         y_t = S_tᵀ q_t / √K
//       out = W_o RMSNorm_head(y)
// As flash-linear-attention has it: the convolution before the recurrence, no gate after it.
// That code starts its convolution from N(0, 0.02) and gives the norm eps 1e-6: conv_std = 0.02,
// norm_eps = 1e-6. The two belong together: such a convolution makes the squared y about 4e-7 at
// the start, and eps = 1e-5 would reduce the norm's output to a fifth.
#include <torch/torch.h>

#include <cmath>

#include "nn/layers.h"
#include "nn/short_conv.h"
#include "ops/recurrence/delta_rule/delta_rule.h"
#include "ops/rowwise/unit_length/unit_length.h"

namespace assay::nn {
namespace {

struct DeltaNet final : Mixer {
  struct Config {
    int64_t num_heads = 4;
    double expand_k = 1;
    double expand_v = 1;
    int64_t conv_width = 4;
    double conv_std = 0;
    double norm_eps = 1e-5;
    void fields(auto&& field) {
      field("num_heads", num_heads, "heads");
      field("expand_k", expand_k, "width of the keys over d_model");
      field("expand_v", expand_v, "width of the values over d_model");
      field("conv_width", conv_width, "taps of the convolution; 0: none");
      field(
          "conv_std", conv_std,
          "standard deviation of the convolution's starting values; 0: uniform in ±1/√conv_width");
      field("norm_eps", norm_eps, "of the norm of each head");
    }
  };

  DeltaNet(const Config& c, int64_t d_model)
      : config(c),
        K(std::llround(c.expand_k * double(d_model))),
        V(std::llround(c.expand_v * double(d_model))) {
    head_width("delta_net", K, c.num_heads);
    qkv = add_linear("qkv", d_model, 2 * K + V);
    conv = register_module(
        "conv", std::make_shared<ShortConv>(2 * K + V, c.conv_width, false, "silu", c.conv_std));
    beta_proj = add_linear("beta_proj", d_model, c.num_heads);
    norm = register_module(
        "norm",
        std::make_shared<Norm>("rmsnorm", head_width("delta_net", V, c.num_heads), c.norm_eps));
    out_proj = add_linear("out_proj", V, d_model, {.role = Role::output});
  }

  at::Tensor forward(const at::Tensor& x, State& state) override {
    const auto heads = [&](const at::Tensor& t) { return split_heads(t, config.num_heads); };
    const auto part = conv->forward(qkv->forward(x), state, {K, K, V});
    at::Tensor y;
    std::tie(y, state["S"]) =
        ops::delta_rule(heads(ops::unit_length(part[0], 1e-6, config.num_heads)),
                        heads(ops::unit_length(part[1], 1e-6, config.num_heads)), heads(part[2]),
                        wide(beta_proj->forward(x)).sigmoid(),
                        std::sqrt(double(config.num_heads) / double(K)), state.find("S"));
    return out_proj->forward(norm->forward(y).flatten(2));
  }

  double mixing_flops(int64_t) const override {
    return 6.0 * double(K * V) / double(config.num_heads) +
           double(2 * config.conv_width * (2 * K + V));
  }

  Config config;
  // of all heads
  int64_t K;
  int64_t V;
  std::shared_ptr<Linear> qkv;
  std::shared_ptr<Linear> beta_proj;
  std::shared_ptr<Linear> out_proj;
  std::shared_ptr<ShortConv> conv;
  std::shared_ptr<Norm> norm;
};

const RegisterMixer<DeltaNet> registered(
    "delta_net",
    "S_t = S_{t−1} + k_t β_t (v_t − S_{t−1}ᵀ k_t)ᵀ, y_t = S_tᵀ q_t / √K, "
    "q and k of unit length [Yang et al. 2024]",
    {{},
     {.num_heads = 3, .expand_k = 0.5, .expand_v = 1.5, .conv_width = 3},
     {.num_heads = 2, .conv_width = 0}});

}  // namespace
}  // namespace assay::nn
