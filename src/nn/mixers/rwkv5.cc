// RWKV-5's time mix (Eagle): linear attention with a trained decay for every key channel, and a
// bonus for the present token. [Peng et al. 2024, §4.1]
//   δ_t = x_{t−1} − x_t     x^c = x + δ ⊙ (1 − mix_c)  for c in k, v, r, g
//       r, k, v, g = W x^r, W x^k, W x^v, W x^g
//   y_t = (S_{t−1} + diag(u) k_t v_tᵀ)ᵀ r_t     S_t = diag(w) S_{t−1} + k_t v_tᵀ
//       ln w = −exp(w₀)
//   out = W_o (LayerNorm_head(y / 8) ⊙ silu(g))
// As RWKV-LM's training code (x052) has it, starting values and parameter groups included.
#include <torch/torch.h>

#include "nn/initial_values.h"
#include "nn/layers.h"
#include "nn/rwkv.h"
#include "ops/recurrence/linear_attention/linear_attention.h"
#include "ops/recurrence/token_shift/token_shift.h"

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
    const at::Tensor i = rwkv::fraction(d);
    const at::Tensor whole = i.pow(rwkv::height(p));
    const at::Tensor half = i.pow(0.5 * rwkv::height(p));
    mix = add_parameter(
        "mix", torch::zeros({4, d}),
        {.start = values(at::stack({whole, whole + 0.3 * rwkv::depth(p), half, half}))});
    r_proj = add_linear("r_proj", d, d, {.start = orthogonal(1)});
    k_proj = add_linear("k_proj", d, d, {.start = orthogonal(0.1)});
    v_proj = add_linear("v_proj", d, d, {.start = orthogonal(1)});
    g_proj = add_linear("g_proj", d, d, {.start = orthogonal(0.1)});
    out_proj = add_linear("out_proj", d, d, {.role = Role::output, .start = constant(0)});
    const at::Tensor per_channel = torch::zeros({config.num_heads, head_dim});
    decay = add_parameter("decay", per_channel.clone(),
                          {.start = values(rwkv::decay_start(p)), .learning_rate = 2});
    bonus = add_parameter("bonus", per_channel.clone(), {.start = values(rwkv::bonus_start(p))});
    norm = register_module("norm", rwkv::norm_of_heads(p, config.num_heads, c.norm_eps));
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

  Config config;
  Place place;
  int64_t head_dim;
  std::shared_ptr<Linear> r_proj;
  std::shared_ptr<Linear> k_proj;
  std::shared_ptr<Linear> v_proj;
  std::shared_ptr<Linear> g_proj;
  std::shared_ptr<Linear> out_proj;
  std::shared_ptr<Norm> norm;
  // [4, d], of k, v, r, g; w₀ and u [H, N]
  at::Tensor mix;
  at::Tensor decay;
  at::Tensor bonus;
};

const RegisterMixer<Rwkv5> registered(
    "rwkv5",
    "S_t = diag(w) S_{t−1} + k_t v_tᵀ, y_t = (S_{t−1} + diag(u) k_t v_tᵀ)ᵀ r_t, "
    "w trained [Peng et al. 2024]",
    {{.num_heads = 3}, {.num_heads = 4}});

}  // namespace
}  // namespace assay::nn
