// BaseConv, the gated short convolution that fills most layers of Based. [Arora et al. 2024,
// §4; Zoology, 2023]
//   based:   u₁, u₂ = W_in x + b     y = W_out (silu(conv(u₁)) ⊙ u₂) + b
//   zoology: y = (conv(x) + b) ⊙ (W x + b) + x     (the residual is inside; no activation)
// As the repositories have it; based's convolution has a bias in its CUDA path only (conv_bias).
#include <torch/torch.h>

#include "nn/layers.h"
#include "nn/short_conv.h"

namespace assay::nn {
namespace {

struct BaseConv final : Mixer {
  struct Config {
    std::string form = "based";
    int64_t expand = 4, conv_width = 3;
    bool conv_bias = true;
    void fields(auto&& field) {
      field("form", form, "based or zoology");
      field("expand", expand, "based: width of u₁ and u₂ together over d_model");
      field("conv_width", conv_width, "taps of the convolution");
      field("conv_bias", conv_bias, "a bias on the convolution");
    }
  };

  BaseConv(const Config& c, int64_t d_model)
      : config(c), inner(based() ? c.expand * d_model / 2 : d_model) {
    one_of("base_conv", "form", c.form, {"based", "zoology"});
    if (inner < 1 || c.conv_width < 1)
      fail("base_conv: expand = {} and conv_width = {} must be positive", c.expand, c.conv_width);
    conv = register_module("conv", std::make_shared<ShortConv>(inner, c.conv_width, c.conv_bias,
                                                               based() ? "silu" : "none"));
    in_proj = add_linear("in_proj", d_model, based() ? 2 * inner : inner, {.bias = true});
    if (based())
      out_proj = add_linear("out_proj", inner, d_model, {.role = Role::output, .bias = true});
  }

  at::Tensor forward(const at::Tensor& x, State& state) override {
    if (!based()) return at::addcmul(x, conv->forward(x, state), in_proj->forward(x));
    const auto u = in_proj->forward(x).chunk(2, -1);
    return out_proj->forward(conv->forward(u[0], state) * u[1]);
  }

  double mixing_flops(int64_t) const override {
    return double(inner) * double(2 * config.conv_width);
  }
  bool based() const { return config.form == "based"; }

  Config config;
  int64_t inner;
  std::shared_ptr<ShortConv> conv;
  std::shared_ptr<Linear> in_proj, out_proj;  // the last null in zoology's form
};

const RegisterMixer<BaseConv> registered(
    "base_conv",
    "W_out (silu(conv(u₁)) ⊙ u₂), u₁, u₂ = W_in x [Based, Arora et al. 2024]; "
    "form zoology: conv(x) ⊙ (W x + b) + x",
    {{}, {.expand = 2, .conv_bias = false}, {.form = "zoology", .conv_width = 4}});

}  // namespace
}  // namespace assay::nn
