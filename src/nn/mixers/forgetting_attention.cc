// Forgetting attention: softmax attention whose scores decay with a gate per head and token.
// [Lin et al. 2025, arXiv 2503.02130, eq. 4]
//   q, k, v, f = W x     c_t = Σ_{s ≤ t} ln σ(f_s + b)     o_i = Σ_{j ≤ i} p_ij v_j
//   p_i = softmax_j(q_i·k_j / √D + c_i − c_j)     out = W_o o,  or W_o (o ⊙ σ(W_g x))
// As flash-linear-attention has it: no positions; qk_norm is a root-mean-square norm per head with
// a weight per channel. c_i does not change the softmax of row i, so this is plain attention with
// more channels: −c_j √D in the keys, 1 in the queries. In bf16 it is the sum of three numbers.
// The gradient of a gate sums dc_t over all later positions, where all but the nearest cancel. In
// bf16 its rounding errors do not (relative error 0.85 after 300 positions), so training computes
// the attention in float32.
#include <torch/torch.h>

#include <cmath>

#include "nn/layers.h"
#include "nn/mixer.h"
#include "ops/attention/window_attention/window_attention.h"
#include "ops/core/split.h"

namespace assay::nn {
namespace {

struct ForgettingAttention final : ProjectedMixer {
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

  ForgettingAttention(const Config& c, int64_t d_model)
      : config(expanded(c, d_model)),
        sharers(config.num_heads / config.num_kv_heads),
        columns((3 * sharers + 7) / 8 * 8) {
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
    // Which of the columns of its key head a query head reads.
    own_columns = register_buffer(
        "own_columns",
        at::constant_pad_nd(at::eye(sharers).repeat({Hk, 3}), {0, columns - 3 * sharers}));
  }

  double scale() const { return 1 / std::sqrt(double(config.head_dim)); }

  // q, v [B, T, ·, D + columns], k [B, T, Hk, D] and ln σ(f + b) [B, T, H]
  using Heads = std::array<at::Tensor, 4>;
  Heads heads_of(const std::vector<at::Tensor>& part) const {
    const auto heads = [&](const at::Tensor& x, const std::shared_ptr<Norm>& norm) {
      return (norm ? norm->forward(x) : x).unflatten(-1, {-1, config.head_dim});
    };
    const at::Tensor q = heads(part[0], q_norm);
    const at::Tensor k = heads(part[1], k_norm);
    const at::Tensor of_q =
        own_columns.to(q.scalar_type()).expand({q.size(0), q.size(1), config.num_heads, columns});
    return {at::cat({q, of_q}, -1), k, at::constant_pad_nd(heads(part[2], nullptr), {0, columns}),
            at::log_sigmoid(wide(part[3]) + forget_bias)};
  }
  // k with its columns: x = −c √D as the sum of three numbers of the dtype of k.
  at::Tensor with_sums(const at::Tensor& k, const at::Tensor& log_forget, State& state) const {
    const at::Tensor sums = running_sum(log_forget.unsqueeze(-1), state, "c");
    const at::Tensor x = sums.flatten(2).unflatten(2, {-1, sharers}) / -scale();
    const at::Tensor high = x.to(k.scalar_type());
    const at::Tensor rest = x.detach() - high.detach();
    const at::Tensor middle = rest.to(k.scalar_type());
    const at::Tensor low = (rest - middle).to(k.scalar_type());
    return at::constant_pad_nd(at::cat({k, high, middle, low}, -1), {0, columns - 3 * sharers});
  }

  // [B, T, H, D + columns]; puts the past of the state before k and v, and what was read into the
  // state.
  at::Tensor attend(const Heads& heads, State& state) const {
    const auto& [q, new_k, new_v, log_forget] = heads;
    const bool trains = at::GradMode::is_enabled() && log_forget.requires_grad();
    const auto precise = [&](const at::Tensor& x) { return trains ? wide(x) : x; };
    const at::Tensor sums = with_sums(precise(new_k), log_forget, state);
    const at::Tensor k = past_k.append(state, sums);
    const at::Tensor v = past_v.append(state, precise(new_v));
    return ops::window_attention(precise(q), k, v, -1, scale()).to(q.scalar_type());
  }
  Projection input_projection() const override { return in_proj->projection(); }
  at::Tensor mix(const at::Tensor& projected, State& state) override {
    const auto part = ops::split(projected, parts);
    const auto body = [this](const Heads& heads, State& own) { return attend(heads, own); };
    const at::Tensor y =
        by_sequence(heads_of(part), state, body).narrow(-1, 0, config.head_dim).flatten(2);
    return out_proj->forward(config.output_gate ? y * part[4].sigmoid() : y);
  }

  at::Tensor attention_weights(const at::Tensor& x) const override {
    const auto [q, new_k, new_v, log_forget] = heads_of(ops::split(in_proj->forward(x), parts));
    State none;
    const at::Tensor k = with_sums(new_k, log_forget, none);
    const at::Tensor v = values_of_positions(k);
    return ops::window_attention_reference(q, k, v, -1, scale()).transpose(1, 2);
  }

  double mixing_flops(int64_t time) const override {
    return 2.0 * double(config.num_heads * config.head_dim) * double(time + 1);
  }

  Config config;
  const Cache past_k = add_cache("k");
  const Cache past_v = add_cache("v");
  // query heads per key head; channels in addition to D
  int64_t sharers;
  int64_t columns;
  std::vector<int64_t> parts;
  std::shared_ptr<Linear> in_proj;
  std::shared_ptr<Linear> out_proj;
  // null without qk_norm
  std::shared_ptr<Norm> q_norm;
  std::shared_ptr<Norm> k_norm;
  at::Tensor forget_bias;
  at::Tensor own_columns;
};

const RegisterMixer<ForgettingAttention> registered(
    "forgetting_attention",
    "out_i = Σ_j softmax_j(q_i·k_j/√D + c_i − c_j) v_j over j ≤ i, c = Σ ln σ(f) [Lin et al. 2025]",
    {{},
     {.num_heads = 6, .num_kv_heads = 2, .head_dim = 5, .output_gate = true},
     {.num_heads = 8, .qk_norm = true}});

}  // namespace
}  // namespace assay::nn
