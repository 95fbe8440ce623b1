// BaseConv, the gated short convolution that fills most layers of Based, and LFM2's, which has a
// gate on each side of the convolution. [Arora et al. 2024, §4; Zoology, 2023; LFM2, 2025]
//   based:   u₁, u₂ = W_in x + b     y = W_out (silu(conv(u₁)) ⊙ u₂) + b
//   zoology: y = (conv(x) + b) ⊙ (W x + b) + x     (the residual is inside; no activation)
//   lfm2:    u₁, u₂, u₃ = W_in x     y = W_out (u₂ ⊙ conv(u₁ ⊙ u₃))
// As the repositories have it; based's convolution has a bias in its CUDA path only (conv_bias).
// lfm2 is that of transformers, whose rows are u₁, u₂, u₃ too; with conv_bias its projections also
// have biases.
#include <torch/torch.h>

#include "nn/layers.h"
#include "nn/short_conv.h"

namespace assay::nn {
namespace {

struct BaseConv final : Mixer {
  struct Config {
    std::string form = "based";
    int64_t expand = 4;
    int64_t conv_width = 3;
    bool conv_bias = true;
    void fields(auto&& field) {
      field("form", form, "based, zoology or lfm2");
      field("expand", expand, "based: width of u₁ and u₂ together over d_model");
      field("conv_width", conv_width, "taps of the convolution");
      field("conv_bias", conv_bias, "a bias on the convolution; lfm2: on the projections too");
    }
  };

  BaseConv(const Config& c, int64_t d_model)
      : config(c), inner(c.form == "based" ? c.expand * d_model / 2 : d_model) {
    one_of("base_conv", "form", c.form, {"based", "zoology", "lfm2"});
    if (inner < 1 || c.conv_width < 1)
      fail("base_conv: expand = {} and conv_width = {} must be positive", c.expand, c.conv_width);
    const bool lfm2 = c.form == "lfm2";
    const bool bias = !lfm2 || c.conv_bias;
    conv =
        register_module("conv", std::make_shared<ShortConv>(inner, c.conv_width, c.conv_bias,
                                                            c.form == "based" ? "silu" : "none"));
    in_proj = add_linear("in_proj", d_model,
                         (lfm2           ? 3
                          : has_output() ? 2
                                         : 1) *
                             inner,
                         {.bias = bias});
    if (has_output())
      out_proj = add_linear("out_proj", inner, d_model, {.role = Role::output, .bias = bias});
  }

  at::Tensor forward(const at::Tensor& x, State& state) override {
    if (!has_output()) return at::addcmul(x, conv->forward(x, state), in_proj->forward(x));
    const auto u = in_proj->forward(x).split(inner, -1);
    const at::Tensor mixed = conv->forward(u.size() == 3 ? u[0] * u[2] : u[0], state);
    return out_proj->forward(mixed * u[1]);
  }

  double mixing_flops(int64_t) const override {
    return double(inner) * double(2 * config.conv_width);
  }
  bool has_output() const { return config.form != "zoology"; }

  Config config;
  int64_t inner;
  std::shared_ptr<ShortConv> conv;
  // the last null in zoology's form
  std::shared_ptr<Linear> in_proj;
  std::shared_ptr<Linear> out_proj;
};

const RegisterMixer<BaseConv> registered(
    "base_conv",
    "W_out (silu(conv(u₁)) ⊙ u₂), u₁, u₂ = W_in x [Based, Arora et al. 2024]; "
    "form zoology: conv(x) ⊙ (W x + b) + x; form lfm2: W_out (u₂ ⊙ conv(u₁ ⊙ u₃)) [LFM2, 2025]",
    {{},
     {.expand = 2, .conv_bias = false},
     {.form = "zoology", .conv_width = 4},
     {.form = "lfm2"},
     {.form = "lfm2", .conv_width = 2, .conv_bias = false}});

}  // namespace
}  // namespace assay::nn
