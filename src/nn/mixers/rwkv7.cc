// RWKV-7's time mix: a delta rule whose decay, removal and storage are vectors read from the token.
//   δ_t = x_{t−1} − x_t     x^c = x + δ ⊙ mix_c  for c in r, w, k, v, a, g
//       [Peng et al. 2025, §4]
//   r, k, v = W x^r, W x^k, W x^v     ln w = −e^{−½} σ(w₀ + tanh(x^w W₁) W₂)
//   a = σ(a₀ + x^a A₁ A₂)             g = σ(x^g G₁) G₂
//   v ← v + (v_first − v) ⊙ σ(v₀ + x^v V₁ V₂)  in all but the first such layer, whose v is v_first
//   κ = k ⊙ k_k of unit length a head     k ← k ⊙ (1 + (a − 1) ⊙ k_a)
//   S_t = diag(w_t) S_{t−1} − (κ_t ⊙ a_t)(S_{t−1}ᵀ κ_t)ᵀ + k_t v_tᵀ     y_t = S_tᵀ r_t
//   out = W_o ((LayerNorm_head(y) + (Σ_head r ⊙ k ⊙ r_k) v) ⊙ g)
// As RWKV-LM's training code (x070) has it, starting values and parameter groups
// included. Its first layer holds v₀, V₁, V₂ unused; ours does not. v_first goes from
// layer to layer in Context::handed.
#include <torch/torch.h>

#include <cmath>

#include "nn/initial_values.h"
#include "nn/layers.h"
#include "nn/rwkv.h"
#include "ops/recurrence/delta_rule/delta_rule.h"
#include "ops/recurrence/token_shift/token_shift.h"
#include "ops/rowwise/rwkv7_elements/rwkv7_elements.h"

namespace assay::nn {
namespace {

struct Rwkv7 final : Mixer {
  struct Config {
    int64_t num_heads = 0;
    int64_t decay_rank = 0;
    int64_t rate_rank = 0;
    int64_t value_rank = 0;
    int64_t gate_rank = 0;
    double norm_eps = 64e-5;
    void fields(auto&& field) {
      field("num_heads", num_heads, "0: heads of 64 channels");
      field("decay_rank", decay_rank, "rank of the decay w; 0: 2.5 √d_model, rounded to 32");
      field("rate_rank", rate_rank,
            "rank of the in-context learning rate a; 0: 2.5 √d_model, rounded to 32");
      field("value_rank", value_rank,
            "rank of the mix with the first layer's values; 0: 1.7 √d_model, rounded to 32");
      field("gate_rank", gate_rank, "rank of the gate g; 0: 5 √d_model, rounded to 32");
      field("norm_eps", norm_eps, "of the norm of each head");
    }
  };

  static Config expanded(Config c, int64_t d_model) {
    const auto rank = [&](double factor) { return rwkv::default_rank(factor, d_model); };
    if (c.num_heads == 0) c.num_heads = d_model / 64;
    if (c.decay_rank == 0) c.decay_rank = rank(2.5);
    if (c.rate_rank == 0) c.rate_rank = rank(2.5);
    if (c.value_rank == 0) c.value_rank = rank(1.7);
    if (c.gate_rank == 0) c.gate_rank = rank(5);
    if (std::min({c.decay_rank, c.rate_rank, c.value_rank, c.gate_rank}) < 1)
      fail("rwkv7: ranks must be positive");
    return c;
  }

  Rwkv7(const Config& c, const Place& p)
      : config(expanded(c, p.d_model)),
        place(p),
        head_dim(head_width("rwkv7", p.d_model, config.num_heads)) {
    const int64_t d = p.d_model;
    const at::Tensor powers = at::tensor({0.2, 0.9, 0.7, 0.7, 0.9, 0.2}, at::kDouble).unsqueeze(1);
    const at::Tensor line = rwkv::ramp(d) - 0.5;
    const at::Tensor curve = (rwkv::ramp(head_dim) * 2 - 1).repeat({config.num_heads});
    const at::Tensor zigzag = curve * curve.abs();
    mix = add_parameter("mix", torch::zeros({6, d}),
                        {.start = values(1 - rwkv::fraction(d).pow(rwkv::height(p) * powers))});
    r_proj = add_linear("r_proj", d, d, {.start = orthogonal(1)});
    k_proj = add_linear("k_proj", d, d, {.start = orthogonal(0.1)});
    v_proj = add_linear("v_proj", d, d, {.start = orthogonal(1)});
    out_proj = add_linear("out_proj", d, d, {.role = Role::output, .start = constant(0)});
    const auto low_rank = [&](const char* name, int64_t rank, const char* activation,
                              std::optional<Treatment> bias) {
      const auto path = register_module(
          name, std::make_shared<LowRank>(d, rank, d, bias.has_value(), activation));
      rwkv::treat_low_rank(*path, orthogonal(0.1), bias);
      return path;
    };
    const at::Tensor decay_start =
        6 * rwkv::ramp(d).pow(1 + std::pow(rwkv::depth(p), 0.3)) - 5.5 + 2.5 * zigzag;
    decay = low_rank("decay", config.decay_rank, "tanh",
                     Treatment{.start = values(decay_start), .learning_rate = 2});
    rate = low_rank("rate", config.rate_rank, "none",
                    Treatment{.start = values(-0.19 + 0.3 * zigzag + 0.4 * line)});
    gate = low_rank("gate", config.gate_rank, "sigmoid", {});
    if (!p.first)
      value_mix = low_rank("value_mix", config.value_rank, "none",
                           Treatment{.start = values(0.73 - 0.4 * line)});
    k_k = add_parameter("k_k", torch::ones({d}), {.start = values(0.71 - 0.1 * line)});
    k_a = add_parameter("k_a", torch::ones({d}), {.start = constant(1.02)});
    r_k = add_parameter("r_k", torch::zeros({config.num_heads, head_dim}),
                        {.start = constant(-0.04)});
    norm = register_module("norm", rwkv::norm_of_heads(p, config.num_heads, config.norm_eps));
  }

  at::Tensor forward(const at::Tensor& x, State& state) override {
    const auto mixed = ops::token_shift(x, rwkv::before(x, state, "shift"), mix);
    const auto heads = [&](const at::Tensor& t) { return split_heads(t, config.num_heads); };
    const at::Tensor r = r_proj->forward(mixed[0]);
    const at::Tensor v = mixed_values(mixed[3], state);
    const auto [w, k, minus_removed, added] =
        ops::rwkv7_prepare(decay->forward(mixed[1]), rate->forward(mixed[4]),
                           k_proj->forward(mixed[2]), k_k, k_a, config.num_heads);
    at::Tensor y;
    std::tie(y, state["S"]) = ops::rwkv7(heads(r), heads(w), heads(k), heads(v),
                                         heads(minus_removed), heads(added), 1, state.find("S"));
    y = norm->forward(y.flatten(2));
    return out_proj->forward(
        ops::rwkv7_output(y, r, k, v, gate->forward(mixed[5]), r_k.flatten(), config.num_heads));
  }

  // The first such layer's own, handed on; the others' mixed with them.
  at::Tensor mixed_values(const at::Tensor& x, State& state) const {
    const at::Tensor v = v_proj->forward(x);
    if (place.first) return state.context.handed["rwkv7.v_first"] = v;
    const auto first = state.context.handed.find("rwkv7.v_first");
    if (first == state.context.handed.end())
      fail<Error>("rwkv7: layer {} was not handed the values of the first such layer", place.layer);
    return ops::rwkv7_values(v, first->second, value_mix->forward(x));
  }

  double mixing_flops(int64_t) const override { return 9.0 * double(place.d_model * head_dim); }

  Config config;
  Place place;
  int64_t head_dim;
  std::shared_ptr<Linear> r_proj;
  std::shared_ptr<Linear> k_proj;
  std::shared_ptr<Linear> v_proj;
  std::shared_ptr<Linear> out_proj;
  // the last null in the first layer
  std::shared_ptr<LowRank> decay;
  std::shared_ptr<LowRank> rate;
  std::shared_ptr<LowRank> gate;
  std::shared_ptr<LowRank> value_mix;
  std::shared_ptr<Norm> norm;
  // [6, d], of r, w, k, v, a, g; [d]; [d]; [H, N]
  at::Tensor mix;
  at::Tensor k_k;
  at::Tensor k_a;
  at::Tensor r_k;
};

const RegisterMixer<Rwkv7> registered(
    "rwkv7",
    "S_t = diag(w_t) S_{t−1} − (κ_t ⊙ a_t)(S_{t−1}ᵀ κ_t)ᵀ + k_t v_tᵀ, y_t = S_tᵀ r_t [Peng et al. "
    "2025]",
    {{.num_heads = 3},
     {.num_heads = 4, .decay_rank = 5, .rate_rank = 3, .value_rank = 2, .gate_rank = 7}});

}  // namespace
}  // namespace assay::nn
