// RWKV-6's time mix (Finch): linear attention with a decay for every key channel and token, and a
// bonus for the present token. [Peng et al. 2024, §4.2]
//   δ_t = x_{t−1} − x_t     m = tanh((x + δ ⊙ mix_x) M₁), in five parts
//   x^c = x + δ ⊙ (mix_c + m_c M₂^c)  for c in w, k, v, r, g
//   r, k, v, g = W x^r, W x^k, W x^v, W x^g     ln w = −exp(w₀ + tanh(x^w W₁) W₂)
//   y_t = (S_{t−1} + diag(u) k_t v_tᵀ)ᵀ r_t     S_t = diag(w_t) S_{t−1} + k_t v_tᵀ
//   out = W_o (LayerNorm_head(y) ⊙ silu(g))
// As RWKV-LM's training code (x060) has it, starting values and parameter groups included.
#include <torch/torch.h>

#include "nn/initial_values.h"
#include "nn/layers.h"
#include "nn/rwkv.h"
#include "ops/recurrence/linear_attention/linear_attention.h"
#include "ops/recurrence/token_shift/token_shift.h"

namespace assay::nn {
namespace {

struct Rwkv6 final : Mixer {
  struct Config {
    int64_t num_heads = 0;
    int64_t mix_rank = 32;
    int64_t decay_rank = 64;
    double norm_eps = 64e-5;
    void fields(auto&& field) {
      field("num_heads", num_heads, "0: heads of 64 channels");
      field("mix_rank", mix_rank, "rank of each of the five mixes");
      field("decay_rank", decay_rank, "rank of the decay");
      field("norm_eps", norm_eps, "of the norm of each head");
    }
  };

  Rwkv6(const Config& c, const Place& p) : config(c), place(p) {
    const int64_t d = p.d_model;
    if (config.num_heads == 0) config.num_heads = d / 64;
    head_dim = head_width("rwkv6", d, config.num_heads);
    if (c.mix_rank < 1 || c.decay_rank < 1) fail("rwkv6: mix_rank and decay_rank must be positive");
    const at::Tensor i = rwkv::fraction(d);
    const at::Tensor whole = i.pow(rwkv::height(p));
    const at::Tensor half = i.pow(0.5 * rwkv::height(p));
    mix_x = add_parameter("mix_x", torch::zeros({d}), {.start = values(1 - whole)});
    mix = add_parameter(
        "mix", torch::zeros({5, d}),
        {.start = values(1 - at::stack({whole, whole, whole + 0.3 * rwkv::depth(p), half, half}))});
    mix_proj =
        add_linear("mix_proj", d, 5 * c.mix_rank, {.start = constant(0), .weight_decay = false});
    mix_up = add_parameter("mix_up", torch::zeros({5, c.mix_rank, d}), {.start = uniform(0.01)});
    r_proj = add_linear("r_proj", d, d, {.start = orthogonal(1)});
    k_proj = add_linear("k_proj", d, d, {.start = orthogonal(0.1)});
    v_proj = add_linear("v_proj", d, d, {.start = orthogonal(1)});
    g_proj = add_linear("g_proj", d, d, {.start = orthogonal(0.1)});
    out_proj = add_linear("out_proj", d, d, {.role = Role::output, .start = constant(0)});
    decay = register_module("decay", std::make_shared<LowRank>(d, c.decay_rank, d, true, "tanh"));
    rwkv::treat_low_rank(*decay, uniform(0.01),
                         Treatment{.start = values(rwkv::decay_start(p)), .learning_rate = 2});
    bonus = add_parameter("bonus", torch::zeros({config.num_heads, head_dim}),
                          {.start = values(rwkv::bonus_start(p))});
    norm = register_module("norm", rwkv::norm_of_heads(p, config.num_heads, c.norm_eps));
  }

  at::Tensor forward(const at::Tensor& x, State& state) override {
    const auto before = rwkv::before(x, state, "shift");
    const auto heads = [&](const at::Tensor& t) { return split_heads(t, config.num_heads); };
    const at::Tensor m = split_heads(
        mix_proj->forward(ops::token_shift(x, before, mix_x.unsqueeze(0))[0]).tanh(), 5);
    const at::Tensor own = at::einsum("btcr,crd->cbtd", {m, mix_up.to(x.scalar_type())});
    const auto mixed = ops::token_shift(x, before, mix, own.unbind());
    at::Tensor y;
    std::tie(y, state["S"]) =
        ops::rwkv6(heads(r_proj->forward(mixed[3])), heads(k_proj->forward(mixed[1])),
                   heads(v_proj->forward(mixed[2])), heads(-wide(decay->forward(mixed[0])).exp()),
                   bonus, 1, state.find("S"));
    return out_proj->forward(norm->forward(y.flatten(2)) * at::silu(g_proj->forward(mixed[4])));
  }

  double mixing_flops(int64_t) const override {
    return double(place.d_model) * double(7 * head_dim + 10 * config.mix_rank);
  }

  Config config;
  Place place;
  int64_t head_dim;
  std::shared_ptr<Linear> mix_proj;
  std::shared_ptr<Linear> r_proj;
  std::shared_ptr<Linear> k_proj;
  std::shared_ptr<Linear> v_proj;
  std::shared_ptr<Linear> g_proj;
  std::shared_ptr<Linear> out_proj;
  std::shared_ptr<LowRank> decay;
  std::shared_ptr<Norm> norm;
  // [d]; [5, d] and [5, rank, d], of w, k, v, r, g; u [H, N]
  at::Tensor mix_x;
  at::Tensor mix;
  at::Tensor mix_up;
  at::Tensor bonus;
};

const RegisterMixer<Rwkv6> registered(
    "rwkv6",
    "S_t = diag(w_t) S_{t−1} + k_t v_tᵀ, y_t = (S_{t−1} + diag(u) k_t v_tᵀ)ᵀ r_t, "
    "w from the token [Peng et al. 2024]",
    {{.num_heads = 3}, {.num_heads = 4, .mix_rank = 3, .decay_rank = 5}});

}  // namespace
}  // namespace assay::nn
