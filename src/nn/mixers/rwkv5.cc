// RWKV-5's time mix (Eagle): linear attention with a trained decay for every key channel, and a
// bonus for the present token. [Peng et al. 2024, §4.1]
//   δ_t = x_{t−1} − x_t     x^c = x + δ ⊙ (1 − mix_c)  for c in k, v, r, g
//       r, k, v, g = W x^r, W x^k, W x^v, W x^g
//   y_t = (S_{t−1} + diag(u) k_t v_tᵀ)ᵀ r_t     S_t = diag(w) S_{t−1} + k_t v_tᵀ
//       ln w = −exp(w₀)
//   out = W_o (LayerNorm_head(y / 8) ⊙ silu(g))
// As RWKV-LM's training code (x052) has it, starting values and parameter groups included.
#include <torch/torch.h>

#include "nn/layers.h"
#include "nn/rwkv.h"
#include "ops/linear_attention/linear_attention.h"
#include "ops/token_shift/token_shift.h"

namespace assay::nn {
namespace {

struct Rwkv5 final : Mixer {
  struct Config {
    int64_t num_heads = 0;
    double norm_eps = 1e-5;
    void fields(auto&& field) {
      field("num_heads", num_heads, "0: heads of 64 channels");
      field("norm_eps", norm_eps, "of the norm of each head, after the division by 8");
    }
  };

  Rwkv5(const Config& c, const Place& p) : config(c), place(p) {
    const int64_t d = p.d_model;
    if (config.num_heads == 0) config.num_heads = d / 64;
    head_dim = head_width("rwkv5", d, config.num_heads);
    mix = register_parameter("mix", torch::zeros({4, d}));
    const auto linear = [&](const char* name) {
      return register_module(name, std::make_shared<Linear>(d, d, false));
    };
    r_proj = linear("r_proj");
    k_proj = linear("k_proj");
    v_proj = linear("v_proj");
    g_proj = linear("g_proj");
    out_proj = linear("out_proj");
    decay = register_parameter("decay", torch::zeros({config.num_heads, head_dim}));
    bonus = register_parameter("bonus", torch::zeros({config.num_heads, head_dim}));
    norm = register_module("norm",
                           std::make_shared<Norm>("layernorm", d, c.norm_eps, config.num_heads));
  }

  at::Tensor forward(const at::Tensor& x, State& state) override {
    const auto mixed = ops::token_shift(x, rwkv::before(x, state, "shift"), 1 - mix);
    const auto heads = [&](const at::Tensor& t) { return split_heads(t, config.num_heads); };
    at::Tensor y;
    std::tie(y, state["S"]) =
        ops::rwkv5(heads(r_proj->forward(mixed[2])), heads(k_proj->forward(mixed[0])),
                   heads(v_proj->forward(mixed[1])), -decay.exp(), bonus, 1.0 / 8, state.find("S"));
    return out_proj->forward(norm->forward(y.flatten(2)) * at::silu(g_proj->forward(mixed[3])));
  }

  double mixing_flops(int64_t) const override { return 7.0 * double(place.d_model * head_dim); }

  bool initialise(const std::string& name, at::Tensor& p, at::Generator generator) override {
    const at::Tensor i = rwkv::fraction(place.d_model), whole = i.pow(rwkv::height(place)),
                     half = i.pow(0.5 * rwkv::height(place));
    if (name == "mix") p.copy_(at::stack({whole, whole + 0.3 * rwkv::depth(place), half, half}));
    else if (name == "decay") p.copy_(rwkv::decay_start(place).view_as(p));
    else if (name == "bonus") p.copy_(rwkv::bonus_start(place).view_as(p));
    else return rwkv::initialise_time_mix(name, p, place, generator);
    return true;
  }

  ParameterGroup group(const std::string& name, const at::Tensor& parameter) const override {
    return rwkv::time_mix_group(name, parameter);
  }

  Config config;
  Place place;
  int64_t head_dim;
  std::shared_ptr<Linear> r_proj, k_proj, v_proj, g_proj, out_proj;
  std::shared_ptr<Norm> norm;
  at::Tensor mix, decay, bonus;  // [4, d], of k, v, r, g; w₀ and u [H, N]
};

const RegisterMixer<Rwkv5> registered(
    "rwkv5",
    "S_t = diag(w) S_{t−1} + k_t v_tᵀ, y_t = (S_{t−1} + diag(u) k_t v_tᵀ)ᵀ r_t, "
    "w trained [Peng et al. 2024]",
    {{.num_heads = 3}, {.num_heads = 4}});

}  // namespace
}  // namespace assay::nn
