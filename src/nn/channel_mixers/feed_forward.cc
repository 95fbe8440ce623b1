// Feed-forward layers, position by position: a plain one with GELU, and gated ones. [Shazeer
// 2020, eq. 6]
//   gelu: W₂ gelu(W₁ x)        geglu, swiglu: W₂ (act(G x) ⊙ U x)
#include <torch/torch.h>

#include "nn/layers.h"
#include "nn/mixer.h"

namespace assay::nn {
namespace {

enum Kind { kGelu, kGeglu, kSwiglu };

template <Kind kind>
struct FeedForward final : ProjectedMixer {
  static constexpr bool gated = kind != kGelu;
  struct Config {
    int64_t d_ff = 0;
    bool bias = false;
    void fields(auto&& field) {
      field(
          "d_ff", d_ff,
          gated ? "hidden width; 0: 8/3 d_model, rounded up to 64" : "hidden width; 0: 4 d_model");
      field("bias", bias, "biases on the projections");
    }
  };

  FeedForward(Config c, int64_t d_model) {
    const int64_t hidden = c.d_ff > 0 ? c.d_ff
                           : gated    ? (d_model * 8 / 3 + 63) / 64 * 64
                                      : 4 * d_model;
    in_proj = add_linear("in_proj", d_model, gated ? 2 * hidden : hidden, {.bias = c.bias});
    out_proj = add_linear("out_proj", hidden, d_model, {.role = Role::output, .bias = c.bias});
  }

  Projection input_projection() const override {
    return in_proj->projection(!gated ? "" : kind == kGeglu ? "gelu" : "silu");
  }
  at::Tensor mix(const at::Tensor& hidden, State&) override {
    return out_proj->forward(gated ? hidden : at::gelu(hidden, "tanh"));
  }

  double mixing_flops(int64_t) const override { return 0; }

  std::shared_ptr<Linear> in_proj;
  std::shared_ptr<Linear> out_proj;
};

const RegisterChannelMixer<FeedForward<kGelu>> plain("gelu", "W₂ gelu(W₁ x)",
                                                     {{}, {.d_ff = 24, .bias = true}});
const RegisterChannelMixer<FeedForward<kGeglu>> geglu("geglu",
                                                      "W₂ (gelu(G x) ⊙ U x) [Shazeer 2020]", {{}});
const RegisterChannelMixer<FeedForward<kSwiglu>> swiglu("swiglu",
                                                        "W₂ (silu(G x) ⊙ U x) [Shazeer 2020]",
                                                        {{}, {.d_ff = 40}});

}  // namespace
}  // namespace assay::nn
