// Mamba-3's mixer (one input and output per head): a state space whose input is integrated with
// the trapezoidal rule, and whose state rotates. [Mamba-3 2026, arXiv 2603.15569]
//   z, x, B, C, δ, a, l, o = W_in h     Δ = softplus(δ + b)     A = −h(a)     λ = σ(l)
//   θ_t = θ_{t−1} + Δ_t π tanh(o_t)     B, C ← R(θ) (RMSNorm_group(B or C) + bias_head)
//   S_t = α_t S_{t−1} + (1 − λ_t) Δ_t α_t B_{t−1} x_{t−1}ᵀ + λ_t Δ_t B_t x_tᵀ     α = exp(Δ A)
//   y_t = S_tᵀ C_t + D x_t     out = W_out (y ⊙ silu(z)),  or of RMSNorm_head(y) ⊙ silu(z)
// R turns the pairs of channels (2i, 2i + 1). h(a) = 1 + a for a ≥ 0, else 1 / (1 − a), and ≥ 1e-4,
// as in state-spaces/mamba since June 2026; earlier softplus(a). D and the biases start at 1,
// softplus(b) is log-uniform in [0.001, 0.1], matrices start as in mamba2.
// Computed as one simple_gla: step s also writes (1 − λ_{s+1}) Δ_{s+1} B_s x_sᵀ of step s + 1, and
// this is subtracted from its output. The last step of a piece leaves it to the next piece.
#include <torch/torch.h>

#include <numbers>

#include "nn/initial_values.h"
#include "nn/layers.h"
#include "nn/mixer.h"
#include "ops/core/split.h"
#include "ops/recurrence/linear_attention/linear_attention.h"
#include "ops/recurrence/matrix_recurrence/kernel.h"
#include "ops/rowwise/mamba3_elements/mamba3_elements.h"

namespace assay::nn {
namespace {

struct Mamba3 final : ProjectedMixer {
  struct Config {
    int64_t state_size = 128;
    int64_t expand = 2;
    int64_t head_dim = 64;
    int64_t num_groups = 1;
    double rotary_fraction = 0.5;
    double norm_eps = 1e-5;
    std::string decay = "heavy_tail";
    bool norm = false;
    void fields(auto&& field) {
      field("state_size", state_size, "N, states per channel");
      field("expand", expand, "inner channels over d_model");
      field("head_dim", head_dim, "channels per head; divides expand · d_model");
      field("num_groups", num_groups, "groups of heads that share B and C; divides the heads");
      field("rotary_fraction", rotary_fraction, "of the N states that rotate");
      field("norm_eps", norm_eps, "of the norms");
      field("decay", decay, "h: heavy_tail or softplus");
      field("norm", norm, "a norm of each head before the gate");
    }
  };

  Mamba3(const Config& c, const Place& p)
      : config(c),
        inner(c.expand * p.d_model),
        groups(c.num_groups * c.state_size),
        pairs(int64_t(double(c.state_size) * c.rotary_fraction) / 2) {
    if (c.head_dim < 1 || inner < 1 || inner % c.head_dim)
      fail("mamba3: head_dim = {} must divide expand · d_model = {}", c.head_dim, inner);
    num_heads = inner / c.head_dim;
    if (c.num_groups < 1 || num_heads % c.num_groups)
      fail("mamba3: num_groups = {} must divide the {} heads", c.num_groups, num_heads);
    if (!(c.rotary_fraction <= 1) || pairs < 1)
      fail("mamba3: rotary_fraction = {} of state_size = {} must be a pair of states or more",
           c.rotary_fraction, c.state_size);
    one_of("mamba3", "decay", c.decay, {"heavy_tail", "softplus"});
    in_proj = add_linear("in_proj", p.d_model, 2 * inner + 2 * groups + 3 * num_heads + pairs,
                         {.start = uniform_by_width()});
    out_proj =
        add_linear("out_proj", inner, p.d_model, {.role = Role::output, .start = mamba_output(p)});
    const auto rms = [&](const char* name, int64_t size, int64_t parts) {
      return register_module(name, std::make_shared<Norm>("rmsnorm", size, c.norm_eps, parts));
    };
    B_norm = rms("B_norm", c.state_size, 1);
    C_norm = rms("C_norm", c.state_size, 1);
    if (c.norm) norm = rms("norm", inner, num_heads);
    B_bias = add_parameter("B_bias", torch::ones({num_heads, c.state_size}));
    C_bias = add_parameter("C_bias", torch::ones({num_heads, c.state_size}));
    dt_bias = add_parameter("dt_bias", torch::zeros({num_heads}), {.start = log_uniform_steps()});
    D = add_parameter("D", torch::ones({num_heads}));
  }

  Projection input_projection() const override { return in_proj->projection(); }
  at::Tensor mix(const at::Tensor& projected, State& state) override {
    const auto part = ops::split(projected, {inner, inner, groups, groups, 3 * num_heads, pairs});
    const auto gates = wide(part[4]).chunk(3, -1);
    const at::Tensor delta = at::softplus(gates[0] + dt_bias);
    const at::Tensor present = gates[2].sigmoid() * delta;
    const at::Tensor past = delta - present;
    const at::Tensor turns = wide(part[5]).tanh() * std::numbers::pi;
    const auto groups_of = [&](const Norm& norm_of_group, const at::Tensor& all) {
      return norm_of_group.forward(split_heads(all, config.num_groups));
    };
    std::optional<at::Tensor> before = state.find("angle");
    if (before) before = before->squeeze(2);
    const auto [B, C, dot, angle] =
        ops::mamba3_rotate(groups_of(*B_norm, part[2]), groups_of(*C_norm, part[3]), B_bias, C_bias,
                           delta, turns, before);
    state["angle"] = angle.unsqueeze(2);
    const at::Tensor later = at::constant_pad_nd(past.slice(1, 1), {0, 0, 0, 1});
    const at::Tensor& a = gates[1];
    const at::Tensor h =
        config.decay == "softplus" ? at::softplus(a) : (1 + at::relu(a)) / (1 + at::relu(-a));
    const auto [written, x] = ops::mamba3_write(part[1], present + later);
    const at::Tensor log_decay = -delta * h.clamp_min(1e-4);
    const auto [y, last] = states(B, C, split_heads(written, num_heads), log_decay, past, state);
    state["S"] = last;
    const at::Tensor heads = split_heads(x, num_heads);
    state["B"] = B.select(1, -1).clone();
    state["x"] = heads.select(1, -1).clone();
    const at::Tensor skip = D - later * dot;
    if (!norm) return out_proj->forward(ops::mamba3_output(y.flatten(2), x, part[0], skip));
    const at::Tensor skipped = heads * skip.unsqueeze(-1).type_as(x);
    return out_proj->forward(norm->forward_then_gate((y + skipped).flatten(2), part[0]));
  }

  // The outputs of all steps, and the last state.
  std::tuple<at::Tensor, at::Tensor> states(const at::Tensor& B, const at::Tensor& C,
                                            const at::Tensor& written, const at::Tensor& log_decay,
                                            const at::Tensor& past, const State& state) const {
    // With one more they still take one pass over the state.
    constexpr int64_t kFewSteps = ops::cuda::kMaxDecodeSteps - 1;
    const std::optional<at::Tensor> first = state.find("S");
    if (!first) return ops::simple_gla(C, B, written, log_decay, 1);
    // The write that the step before these left to them.
    const at::Tensor k = *state.find("B");                                    // [B, H, N]
    const at::Tensor v = *state.find("x") * past.select(1, 0).unsqueeze(-1);  // [B, H, P]
    if (B.size(1) > kFewSteps)
      return ops::simple_gla(C, B, written, log_decay, 1,
                             *first + wide(k).unsqueeze(-1) * v.unsqueeze(-2));
    const auto after = [](const at::Tensor& step, const at::Tensor& steps) {
      return at::cat({step.unsqueeze(1).to(steps.scalar_type()), steps}, 1);
    };
    const auto [y, last] = ops::simple_gla(after(k, C), after(k, B), after(v, written),
                                           at::constant_pad_nd(log_decay, {0, 0, 1, 0}), 1, first);
    return {y.slice(1, 1).contiguous(), last};
  }

  double mixing_flops(int64_t) const override {
    return double(5 * inner * config.state_size + num_heads * (2 * config.state_size + 12 * pairs));
  }

  Config config;
  int64_t inner;
  int64_t groups;  // channels of B, and of C
  int64_t pairs;
  int64_t num_heads;
  std::shared_ptr<Linear> in_proj;
  std::shared_ptr<Linear> out_proj;
  std::shared_ptr<Norm> B_norm;
  std::shared_ptr<Norm> C_norm;
  std::shared_ptr<Norm> norm;  // null unless configured
  at::Tensor B_bias;
  at::Tensor C_bias;
  at::Tensor dt_bias;
  at::Tensor D;
};

const RegisterMixer<Mamba3> registered(
    "mamba3",
    "S_t = α_t S_{t−1} + (1 − λ_t) Δ_t α_t B_{t−1} x_{t−1}ᵀ + λ_t Δ_t B_t x_tᵀ, "
    "y_t = S_tᵀ C_t + D x_t, B and C rotated, gated by silu(z_t) [Mamba-3 2026]",
    {{.state_size = 16, .head_dim = 16},
     {.state_size = 9, .head_dim = 8, .num_groups = 2, .rotary_fraction = 1, .decay = "softplus"},
     {.state_size = 6, .expand = 1, .head_dim = 8, .num_groups = 3, .norm = true}});

}  // namespace
}  // namespace assay::nn
