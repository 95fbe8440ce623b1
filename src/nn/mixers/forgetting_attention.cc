// Forgetting attention: softmax attention whose scores decay with a gate per head and token.
// [Lin et al. 2025, arXiv 2503.02130, eq. 4]
//   q, k, v, f = W x     c_t = Σ_{s ≤ t} ln σ(f_s + b)     o_i = Σ_{j ≤ i} p_ij v_j
//   p_i = softmax_j(q_i·k_j / √D + c_i − c_j)     out = W_o o,  or W_o (o ⊙ σ(W_g x))
// As flash-linear-attention has it: no positions; qk_norm is a root-mean-square norm per head with
// a weight per channel.
#include <torch/torch.h>

#include <cmath>

#include "nn/layers.h"
#include "nn/mixer.h"
#include "ops/attention/window_attention/window_attention.h"
#include "ops/core/split.h"

namespace assay::nn {
namespace {

struct ForgettingAttention final : ProjectedMixer, HeadwiseMixer {
  struct Config {
    int64_t num_heads = 4;
    int64_t num_kv_heads = 0;
    int64_t head_dim = 0;
    bool qk_norm = false;
    bool output_gate = false;
    double norm_eps = 1e-5;
    void fields(auto&& field) {
      field("num_heads", num_heads, "query heads, each with a gate");
      field("num_kv_heads", num_kv_heads, "key and value heads; divides num_heads; 0: num_heads");
      field("head_dim", head_dim, "0: d_model / num_heads");
      field("qk_norm", qk_norm, "a norm of each head of queries and keys");
      field("output_gate", output_gate, "the output is multiplied by σ(W_g x)");
      field("norm_eps", norm_eps, "of qk_norm");
    }
  };

  static Config expanded(Config c, int64_t d_model) {
    if (c.num_kv_heads == 0) c.num_kv_heads = c.num_heads;
    if (c.head_dim <= 0) c.head_dim = head_width("forgetting_attention", d_model, c.num_heads);
    if (c.num_kv_heads < 1 || c.num_heads % c.num_kv_heads)
      fail("forgetting_attention: num_kv_heads = {} must divide num_heads = {}", c.num_kv_heads,
           c.num_heads);
    return c;
  }

  ForgettingAttention(const Config& c, int64_t d_model) : config(expanded(c, d_model)) {
    const int64_t H = config.num_heads;
    const int64_t Hk = config.num_kv_heads;
    const int64_t D = config.head_dim;
    parts = {H * D, Hk * D, Hk * D, H};
    if (config.output_gate) parts.push_back(H * D);
    in_proj = add_linear("in_proj", d_model, c10::sum_integers(parts));
    out_proj = add_linear("out_proj", H * D, d_model, {.role = Role::output});
    const auto norm = [&](const char* name, int64_t heads) {
      return register_module(name,
                             std::make_shared<Norm>("rmsnorm", heads * D, config.norm_eps, heads));
    };
    if (config.qk_norm) q_norm = norm("q_norm", H);
    if (config.qk_norm) k_norm = norm("k_norm", Hk);
    forget_bias = add_parameter("forget_bias", torch::zeros({H}));
  }

  double scale() const { return 1 / std::sqrt(double(config.head_dim)); }

  // q [B, T, H, D]; k, v [B, T, Hk, D]; ln σ(f + b) [B, T, H]
  using Heads = std::array<at::Tensor, 4>;
  Heads heads_of(const std::vector<at::Tensor>& part) const {
    const auto heads = [&](const at::Tensor& x, const std::shared_ptr<Norm>& norm) {
      return (norm ? norm->forward(x) : x).unflatten(-1, {-1, config.head_dim});
    };
    return {heads(part[0], q_norm), heads(part[1], k_norm), heads(part[2], nullptr),
            at::log_sigmoid(wide(part[3]) + forget_bias)};
  }
  static at::Tensor decay_sums(const at::Tensor& log_forget, State& state) {
    return running_sum(log_forget.unsqueeze(-1), state, "c").squeeze(-1);
  }

  // [B, T, H, D]; puts the past of the state before k, v and c, and what was read into the state.
  at::Tensor attend(const Heads& heads, State& state) const {
    const auto& [q, new_k, new_v, log_forget] = heads;
    const at::Tensor k = past_k.append(state, new_k);
    const at::Tensor v = past_v.append(state, new_v);
    const at::Tensor sums = past_sums.append(state, decay_sums(log_forget, state));
    return ops::window_attention(q, k, v, -1, scale(), {}, {}, sums);
  }
  Projection input_projection() const override { return in_proj->projection(); }
  at::Tensor mix(const at::Tensor& projected, State& state) override {
    const auto part = ops::split(projected, parts);
    const auto body = [this](const Heads& heads, State& own) { return attend(heads, own); };
    return output(by_sequence(heads_of(part), state, body).flatten(2), gate_of(part));
  }
  at::Tensor gate_of(const std::vector<at::Tensor>& part) const {
    return config.output_gate ? part[4] : at::Tensor();
  }

  HeadInputs head_inputs(const at::Tensor& x, int64_t /*position*/, State&) const override {
    const auto part = ops::split(input_projection()(x), parts);
    const auto [q, k, v, log_forget] = heads_of(part);
    return {{q, k, v, log_forget}, gate_of(part)};
  }
  size_t num_head_inputs() const override { return 4; }
  bool divides_heads(int64_t count) const override { return config.num_kv_heads % count == 0; }
  at::Tensor attend_whole(const HeadList& heads, int64_t /*first*/) override {
    State whole;
    whole.context.last = true;
    return attend({heads[0], heads[1], heads[2], heads[3]}, whole);
  }
  at::Tensor output(const at::Tensor& y, const at::Tensor& gate) const override {
    return out_proj->forward(gate.defined() ? y * gate.sigmoid() : y);
  }

  at::Tensor attention_weights(const at::Tensor& x) const override {
    const auto [q, k, v, log_forget] = heads_of(ops::split(in_proj->forward(x), parts));
    State none;
    return ops::window_attention_reference(q, k, values_of_positions(k), -1, scale(), {}, {},
                                           decay_sums(log_forget, none))
        .transpose(1, 2);
  }

  double mixing_flops(int64_t time) const override {
    return 2.0 * double(config.num_heads * config.head_dim) * double(time + 1);
  }

  Config config;
  const Cache past_k = add_cache("k");
  const Cache past_v = add_cache("v");
  const Cache past_sums = add_cache("sums");
  std::vector<int64_t> parts;
  std::shared_ptr<Linear> in_proj;
  std::shared_ptr<Linear> out_proj;
  // null without qk_norm
  std::shared_ptr<Norm> q_norm;
  std::shared_ptr<Norm> k_norm;
  at::Tensor forget_bias;
};

const RegisterMixer<ForgettingAttention> registered(
    "forgetting_attention",
    "out_i = Σ_j softmax_j(q_i·k_j/√D + c_i − c_j) v_j over j ≤ i, c = Σ ln σ(f) [Lin et al. 2025]",
    {{},
     {.num_heads = 6, .num_kv_heads = 2, .head_dim = 5, .output_gate = true},
     {.num_heads = 8, .qk_norm = true}});

}  // namespace
}  // namespace assay::nn
