#pragma once
// A mixer with an auxiliary loss, for tests: y_t = W (x_t + x_{t−1}), and the loss is the mean
// of y². Include <torch/torch.h> first.
#include "nn/layers.h"
#include "nn/mixer.h"

namespace assay::nn {

struct AuxiliaryMixer final : Mixer {
  struct Config {
    double weight = 0.5;
    void fields(auto&& field) { field("weight", weight, "of the auxiliary loss"); }
  };
  AuxiliaryMixer(Config c, int64_t d_model) : config(c) {
    proj = add_linear("proj", d_model, d_model);
  }
  at::Tensor forward(const at::Tensor& x, State& state) override {
    const at::Tensor before = state.find("x").value_or(at::zeros_like(x.slice(1, 0, 1)));
    const at::Tensor y = proj->forward(x + at::cat({before, x.slice(1, 0, -1)}, 1));
    state["x"] = x.slice(1, -1);
    if (state.context.wants_auxiliary_loss())
      state.context.add_auxiliary_loss(config.weight * wide(y).square().mean());
    return y;
  }
  bool has_auxiliary_loss() const override { return true; }
  double mixing_flops(int64_t) const override { return 0; }

  Config config;
  std::shared_ptr<Linear> proj;
};

inline const RegisterMixer<AuxiliaryMixer> auxiliary_mixer(
    "auxiliary_mixer", "y_t = W (x_t + x_{t−1}), loss: mean of y²", {{}});

}  // namespace assay::nn
