// Softmax attention, full or over a window, with positions, QK-norm and the ablations that take
// its parts away.
//   q, k, v = W x; q, k ← norm(rotary(q), rotary(k)); out = W_o attention(q, k, v)
//   [Vaswani 2017; RoFormer]
// ALiBi: head i of H (from 1) subtracts 2^(−8i/H) times the distance from its scores. [Press 2022,
// §3] QK-norm: q, k divided by their length per head; the scale is learned per head, [Henry 2020,
// eq. 6] or fixed at 1 / temperature. [BC §3, Figure 4] The scale starts at 20, which is log2(L² −
// L) for L = 1024 [Henry 2020]. AdamW moves a parameter by about the sum of its learning rates at
// most. That sum is 0.6 for 1,250 steps with a peak of 1e-3, so the scale learns 40 times as fast
// as the matrices. A relative step is then twice the learning rate, as with RMSNorm weights on q
// and k [Qwen3, Gemma 3].
// Constants: k_j, or q_j and k_j, is a trained vector of position j and head, whatever stands
// there: no relation between contents is left. [BC §3; Synthesizer, Tay 2021: random, factorised]
// qk_rmsnorm: q, k ← RMSNorm(q), RMSNorm(k) before the rotation, per head [Qwen3; LFM2], with 1 +
// weight [Qwen3-Next], or over all heads [OLMo 2]. softmax_scale is that of the scores [Granite].
// Gate: W_o (attention(q, k, v) ⊙ σ(W_g x)), one gate per channel or per head. [Qiu et al. 2025]
// Its rows are the last ones of `qkv`. With rotary_fraction < 1, the first channels of a head are
// turned, with the frequencies of a head of that size. [GPT-NeoX; Qwen3-Next]
// Sinks: the softmax of each row has one more score, a trained number of the head, whose value is
// zero. [Agarwal et al. 2025, arXiv 2508.10925: gpt-oss]
#include <torch/torch.h>

#include <cmath>

#include "nn/initial_values.h"
#include "nn/layers.h"
#include "nn/mixer.h"
#include "ops/attention/decode_attention/decode_attention.h"
#include "ops/attention/rotary_qkv/rotary_qkv.h"
#include "ops/attention/window_attention/window_attention.h"
#include "ops/core/split.h"

namespace assay::nn {
namespace {

struct Attention final : ProjectedMixer, HeadwiseMixer {
  using Heads = std::array<at::Tensor, 3>;  // q [B, T, H, D], k and v [B, T, Hk, D]
  struct Config {
    int64_t num_heads = 4;
    int64_t num_kv_heads = 0;
    int64_t head_dim = 0;
    int64_t window = -1;
    std::string position = "rope";
    double rope_base = 10000;
    double rotary_fraction = 1;
    std::string gate = "none";
    bool qk_norm = false;
    bool bias = false;
    bool sinks = false;
    bool qkv_bias = false;
    double initial_scale = 20;
    double scale_learning_rate = 40;
    double temperature = 0;
    std::string qk_rmsnorm = "none";
    double norm_eps = 1e-5;
    double softmax_scale = 0;
    std::string constants = "none";
    int64_t max_positions = 0;
    void fields(auto&& field) {
      field("num_heads", num_heads, "query heads");
      field("num_kv_heads", num_kv_heads, "key and value heads; divides num_heads; 0: num_heads");
      field("head_dim", head_dim, "0: d_model / num_heads");
      field("window", window, "positions seen, the own one included; -1: all");
      field("position", position, "rope, alibi or none");
      field("rope_base", rope_base, "base of the rotary frequencies");
      field("rotary_fraction", rotary_fraction, "of the channels of a head that rope turns");
      field("gate", gate, "none, element or head: what one gate of the output multiplies");
      field("qk_norm", qk_norm, "unit-length queries and keys, a learned scale per head");
      field("initial_scale", initial_scale, "with qk_norm: where the learned scale starts");
      field("scale_learning_rate", scale_learning_rate,
            "with qk_norm: learning rate of the scale over that of the run");
      field("temperature", temperature,
            "with qk_norm: scores are q·k / temperature; 0: the learned scale");
      field("qk_rmsnorm", qk_rmsnorm,
            "none, head, zero_centered_head or all_heads: RMSNorm of queries and keys before rope");
      field("norm_eps", norm_eps, "of qk_rmsnorm");
      field("softmax_scale", softmax_scale, "of the scores q·k; 0: 1/√head_dim");
      field("constants", constants,
            "none, keys, or queries_and_keys: "
            "trained vectors of the position instead of projections");
      field("max_positions", max_positions, "of the constants: the longest sequence");
      field("bias", bias, "biases on the projections");
      field("sinks", sinks, "one more score per head in the softmax, trained, without a value");
      field("qkv_bias", qkv_bias, "biases on all projections but that of the output [Qwen2]");
    }
  };

  Attention(Config c, int64_t d_model)
      : config(expanded(c, d_model)),
        rotary_dim(int64_t(config.rotary_fraction * double(config.head_dim)) / 2 * 2),
        rotary(rotary_dim, config.rope_base) {
    const int64_t heads = config.num_heads;
    const int64_t kv_heads = config.num_kv_heads;
    const int64_t D = config.head_dim;
    parts = {constant_queries() ? 0 : heads, constant_keys() ? 0 : kv_heads, kv_heads};
    columns = {(parts[0] + parts[1] + parts[2]) * D};
    if (config.gate != "none") columns.push_back(config.gate == "head" ? heads : heads * D);
    qkv = add_linear("qkv", d_model, c10::sum_integers(columns),
                     {.bias = config.bias || config.qkv_bias});
    out_proj =
        add_linear("out_proj", heads * D, d_model, {.role = Role::output, .bias = config.bias});
    if (config.qk_rmsnorm != "none") {
      q_norm = register_module("q_norm", head_norm(heads));
      k_norm = register_module("k_norm", head_norm(kv_heads));
    }
    // As large as the projections that they replace: W x with W from N(0, 0.02) and x of unit size
    const Treatment of_constants{.start = normal(kMatrixDeviation * std::sqrt(double(d_model)))};
    if (constant_queries())
      queries =
          add_parameter("queries", torch::zeros({config.max_positions, heads, D}), of_constants);
    if (constant_keys())
      keys = add_parameter("keys", torch::zeros({config.max_positions, kv_heads, D}), of_constants);
    if (config.qk_norm && config.temperature == 0)
      scale = add_parameter("scale", torch::full({heads}, config.initial_scale),
                            {.learning_rate = config.scale_learning_rate});
    if (config.sinks)
      sinks = add_parameter("sinks", torch::zeros({heads}), {.start = normal(kMatrixDeviation)});
    if (config.position == "alibi")
      slopes = register_buffer("slopes", at::exp2(-8.0 * at::arange(1, heads + 1) / double(heads)));
  }

  static Config expanded(Config c, int64_t d_model) {
    if (c.num_heads < 1 || (c.head_dim == 0 && d_model % c.num_heads))
      fail("attention: num_heads = {} must be positive and divide d_model = {}", c.num_heads,
           d_model);
    if (c.num_kv_heads == 0) c.num_kv_heads = c.num_heads;
    if (c.num_kv_heads < 1 || c.num_heads % c.num_kv_heads)
      fail("attention: num_kv_heads = {} must divide num_heads = {}", c.num_kv_heads, c.num_heads);
    if (c.head_dim == 0) c.head_dim = d_model / c.num_heads;
    if (c.head_dim < 0 || (c.position == "rope" && c.head_dim % 2))
      fail("attention: rope needs an even head_dim, got {}", c.head_dim);
    if (c.window == 0 || c.window < -1)
      fail("attention: window = {} must be positive, or -1 for all positions", c.window);
    one_of("attention", "position", c.position, {"rope", "alibi", "none"});
    one_of("attention", "gate", c.gate, {"none", "element", "head"});
    if (!(c.rotary_fraction > 0 && c.rotary_fraction <= 1))
      fail("attention: rotary_fraction = {} must be positive and at most 1", c.rotary_fraction);
    one_of("attention", "constants", c.constants, {"none", "keys", "queries_and_keys"});
    one_of("attention", "qk_rmsnorm", c.qk_rmsnorm,
           {"none", "head", "zero_centered_head", "all_heads"});
    if (c.qk_rmsnorm != "none" && (c.qk_norm || c.constants != "none"))
      fail("attention: qk_rmsnorm = '{}' needs qk_norm = false and constants = 'none'",
           c.qk_rmsnorm);
    if (!(c.norm_eps > 0)) fail("attention: norm_eps = {} must be positive", c.norm_eps);
    if (!(c.softmax_scale >= 0) || std::isinf(c.softmax_scale))
      fail("attention: softmax_scale = {} must be positive, or 0 for 1/√head_dim", c.softmax_scale);
    if (c.softmax_scale > 0 && c.qk_norm)
      fail("attention: softmax_scale = {} needs qk_norm = false", c.softmax_scale);
    check_scale("attention", c.initial_scale, c.scale_learning_rate);
    if (!(c.temperature >= 0) || std::isinf(c.temperature))
      fail("attention: temperature = {} must be positive, or 0 for the learned scale",
           c.temperature);
    if (c.temperature > 0 && !c.qk_norm)
      fail("attention: temperature = {} needs qk_norm = true", c.temperature);
    if (c.constants != "none" && c.max_positions < 1)
      fail("attention: constants = '{}' needs max_positions, the longest sequence that is read",
           c.constants);
    return c;
  }

  bool constant_keys() const { return config.constants != "none"; }
  bool constant_queries() const { return config.constants == "queries_and_keys"; }

  // The projected queries, keys and values, and the gate, which is undefined without one.
  struct Parts {
    at::Tensor qkv;
    at::Tensor gate;
  };
  Parts parts_of(const at::Tensor& projected) const {
    Parts part{projected, {}};
    if (config.gate != "none") {
      const auto both = ops::split(projected, columns);
      part = {both[0], both[1]};
    }
    if (q_norm) part.qkv = normed(part.qkv);
    return part;
  }
  std::shared_ptr<Norm> head_norm(int64_t heads) const {
    const bool whole = config.qk_rmsnorm == "all_heads";
    const char* kind =
        config.qk_rmsnorm == "zero_centered_head" ? "zero_centered_rmsnorm" : "rmsnorm";
    return std::make_shared<Norm>(kind, whole ? heads * config.head_dim : config.head_dim,
                                  config.norm_eps);
  }
  // qkv [..., (H + 2 Hkv) D] with the norms of qk_rmsnorm.
  at::Tensor normed(const at::Tensor& qkv) const {
    const int64_t D = config.head_dim;
    const auto part = ops::split(qkv, {parts[0] * D, parts[1] * D, parts[2] * D});
    const auto norm_of = [&](const Norm& norm, const at::Tensor& x) {
      return norm.forward(x.unflatten(-1, {-1, norm.weight.size(0)})).flatten(-2);
    };
    return at::cat({norm_of(*q_norm, part[0]), norm_of(*k_norm, part[1]), part[2]}, -1);
  }
  at::Tensor output(const at::Tensor& y, const at::Tensor& gate) const override {
    if (!gate.defined()) return out_proj->forward(y);
    const at::Tensor factor = gate.sigmoid();
    return out_proj->forward(
        config.gate == "element"
            ? y * factor
            : (y.unflatten(-1, {-1, config.head_dim}) * factor.unsqueeze(-1)).flatten(-2));
  }

  bool turns_whole_heads() const {
    return config.position == "rope" && rotary_dim == config.head_dim;
  }
  at::Tensor turned(const at::Tensor& x, int64_t position, State& state) const {
    if (turns_whole_heads()) return rotary(x, position, state);
    return at::cat({rotary(x.narrow(-1, 0, rotary_dim), position, state), x.slice(-1, rotary_dim)},
                   -1);
  }

  // Queries, keys and values as attention takes them, from the projected x without the gate. Its
  // first token is at `position`; or [1, B, N] are rows at positions of their own.
  Heads heads_of(const at::Tensor& projected, int64_t position, State& state) const {
    if (turns_whole_heads() && !constant_keys()) {
      const auto [cos, sin] = rotary.angles(projected, position, state);
      return ops::rotary_qkv_(projected, config.num_heads, config.num_kv_heads, cos, sin,
                              norm_scale(cos.options()));
    }
    const auto heads = projected.unflatten(-1, {-1, config.head_dim}).split_with_sizes(parts, 2);
    at::Tensor q = constant_queries() ? constants(queries, projected, position, state) : heads[0];
    at::Tensor k = constant_keys() ? constants(keys, projected, position, state) : heads[1];
    if (config.position == "rope") {
      q = turned(q, position, state);
      k = turned(k, position, state);
    }
    if (config.qk_norm) {
      q = unit_length(q);
      k = unit_length(k);
    }
    if (scale.defined()) q = q * scale.to(q.scalar_type()).unsqueeze(-1);
    return {q, k, heads[2]};
  }
  double softmax_scale() const {
    if (config.softmax_scale > 0) return config.softmax_scale;
    if (!config.qk_norm) return 1 / std::sqrt(double(config.head_dim));
    return scale.defined() ? 1 : 1 / config.temperature;
  }
  // Scale of queries of unit length, [H]; no value without QK-norm.
  std::optional<at::Tensor> norm_scale(const at::TensorOptions& options) const {
    if (!config.qk_norm) return {};
    return scale.defined() ? scale : at::ones({config.num_heads}, options);
  }
  at::Tensor constants(const at::Tensor& table, const at::Tensor& x, int64_t position,
                       const State& state) const {
    const RowPositions& rows = state.context.rows;
    const int64_t end = rows.empty() ? position + x.size(1) : rows.end();
    if (end > config.max_positions)
      fail("attention: position {} is beyond max_positions = {} of its constants", end - 1,
           config.max_positions);
    const at::Tensor own = rows.empty() ? table.slice(0, position, end)
                                        : table.index_select(0, rows.index(table.device()));
    return own.to(x.scalar_type()).unsqueeze(0).expand({x.size(0), -1, -1, -1});
  }
  std::optional<at::Tensor> slopes_or_none() const {
    return slopes.defined() ? std::optional(slopes) : std::nullopt;
  }
  std::optional<at::Tensor> sinks_or_none() const {
    return sinks.defined() ? std::optional(sinks) : std::nullopt;
  }

  Projection input_projection() const override { return qkv->projection(); }
  at::Tensor mix(const at::Tensor& projected, State& state) override {
    const int64_t position = state.advance(projected.size(1));
    if (is_step(projected, state) && kernel_makes_queries(projected.options())) {
      const Parts part = parts_of(projected);
      const at::Tensor y = attend_token(token(part.qkv.flatten(0, 1), position, state), state);
      return output(y.view({projected.size(0), projected.size(1), -1}), part.gate);
    }
    const auto body = [this](const Heads& heads, State& own) { return attend(heads, own); };
    const Parts part = parts_of(projected);
    const Heads heads = heads_of(part.qkv, position, state);
    return output(by_sequence(heads, state, body).flatten(2), part.gate);
  }
  HeadInputs head_inputs(const at::Tensor& x, int64_t position, State& state) const override {
    const Parts part = parts_of(input_projection()(x));
    const auto [q, k, v] = heads_of(part.qkv, position, state);
    return {{q, k, v}, part.gate};
  }
  bool divides_heads(int64_t parts) const override {
    return config.window < 0 && config.num_kv_heads % parts == 0;
  }
  int64_t reach() const override { return config.window < 0 ? -1 : config.window - 1; }
  at::Tensor attend_whole(const HeadList& heads, int64_t first) override {
    const auto own = [&](const at::Tensor& of_heads) {
      return of_heads.defined() ? std::optional(of_heads.narrow(0, first, heads[0].size(2)))
                                : std::nullopt;
    };
    return ops::window_attention(heads[0], heads[1], heads[2], config.window, softmax_scale(),
                                 own(slopes), own(sinks));
  }
  bool can_be_captured(const at::TensorOptions& options) const override {
    return kernel_makes_queries(options);
  }
  // One token per sequence, which decode_attention may take.
  static bool is_step(const at::Tensor& x, const State& state) {
    return (x.size(1) == 1 || !state.context.rows.empty()) && !state.context.last &&
           !at::GradMode::is_enabled();
  }

  // One token per sequence: q, k, v [B, heads, D], and what decode_attention does with them.
  struct Token {
    at::Tensor q;
    at::Tensor k;
    at::Tensor v;
    ops::DecodeOptions options;
    int64_t position = 0;  // where the options depend on it
  };
  // decode_attention has no sinks.
  bool kernel_decodes(const at::TensorOptions& options) const {
    return !config.sinks && ops::decode_attention_serves(options, config.head_dim);
  }
  // Whether decode_attention takes them from the projection.
  bool kernel_makes_queries(const at::TensorOptions& options) const {
    const bool rotates =
        config.position != "rope" || (turns_whole_heads() && config.head_dim % 16 == 0);
    return config.constants == "none" && rotates && kernel_decodes(options);
  }
  // projected [B, N]
  Token token(const at::Tensor& projected, int64_t position, const State& state) const {
    const auto heads = projected.unflatten(-1, {-1, config.head_dim}).split_with_sizes(parts, 1);
    ops::DecodeOptions options{.scale = softmax_scale(),
                               .norm_scale = norm_scale(projected.options().dtype(at::kFloat)),
                               .alibi_slopes = slopes_or_none()};
    const RowPositions& rows = state.context.rows;
    if (config.position == "rope")
      std::tie(options.cos, options.sin) =
          rotary.tables(projected, rows.empty() ? position + 1 : rows.capacity);
    return {heads[0], heads[1], heads[2], options, position};
  }
  // → [B, H, D]
  at::Tensor attend_token(Token token, State& state) const {
    if (state.rows.addresses.defined()) {
      token.options.window = past_k.window();
      if (token.options.cos) state.rows.read_by_graph = {*token.options.cos, *token.options.sin};
      return ops::decode_attention(token.q, token.k, token.v, state.context.rows.on_device,
                                   state.rows.addresses, token.options);
    }
    const at::Tensor keys = past_k.grow(state, token.k.unsqueeze(1));
    const at::Tensor values = past_v.grow(state, token.v.unsqueeze(1));
    return ops::decode_attention(token.q, token.k, token.v, keys, values, token.position,
                                 token.options);
  }

  // [B, T, H, D]; puts the past of the state before k and v, and what was read into the state.
  at::Tensor attend(const Heads& heads, State& state) const {
    const auto& [q, k, v] = heads;
    if (is_step(q, state) && kernel_decodes(q.options()))
      return attend_token({q.squeeze(1),
                           k.squeeze(1),
                           v.squeeze(1),
                           {.scale = softmax_scale(), .alibi_slopes = slopes_or_none()}},
                          state)
          .unsqueeze(1);
    return ops::window_attention(q, past_k.append(state, k), past_v.append(state, v), config.window,
                                 softmax_scale(), slopes_or_none(), sinks_or_none());
  }

  at::Tensor attention_weights(const at::Tensor& x) const override {
    State none;
    const auto [q, k, v] = heads_of(parts_of(qkv->forward(x)).qkv, 0, none);
    return ops::window_attention_reference(q, k, values_of_positions(k), config.window,
                                           softmax_scale(), slopes_or_none(), sinks_or_none())
        .transpose(1, 2);
  }

  double mixing_flops(int64_t time) const override {
    const double window = config.window < 0 ? double(time) : double(std::min(config.window, time));
    return 4.0 * double(config.num_heads * config.head_dim) *
           (window - window * (window - 1) / (2.0 * double(time)));
  }

  int64_t max_time() const override { return constant_keys() ? config.max_positions : INT64_MAX; }

  Config config;
  const Cache past_k = add_cache("k", {.window = std::max<int64_t>(config.window, 0)});
  const Cache past_v = add_cache("v", {.window = std::max<int64_t>(config.window, 0)});
  int64_t rotary_dim;  // channels of a head that rope turns
  Rotary rotary;
  std::vector<int64_t> parts;    // heads of q, k, v that are projected
  std::vector<int64_t> columns;  // that `qkv` makes: of queries, keys and values, and of the gate
  std::shared_ptr<Linear> qkv;
  std::shared_ptr<Linear> out_proj;
  // null without qk_rmsnorm
  std::shared_ptr<Norm> q_norm;
  std::shared_ptr<Norm> k_norm;
  // undefined when not configured
  at::Tensor scale;
  at::Tensor queries;
  at::Tensor keys;
  at::Tensor slopes;
  at::Tensor sinks;  // undefined when not configured
};

const RegisterMixer<Attention> registered(
    "attention",
    "out_t = Σ_j softmax_j(q_t·k_j/√D) v_j over j ≤ t, "
    "or the last `window` positions [Vaswani 2017]",
    {{},
     {.num_heads = 6, .num_kv_heads = 2},
     {.window = 16},
     {.window = 7, .position = "none"},
     {.qk_norm = true, .bias = true},
     {.num_heads = 6, .num_kv_heads = 3, .window = 30, .position = "alibi"},
     {.qk_norm = true, .temperature = 0.1},
     {.num_heads = 6, .num_kv_heads = 2, .gate = "element"},
     {.window = 9, .rotary_fraction = 0.5, .gate = "head", .qk_norm = true},
     {.num_heads = 8, .sinks = true},
     {.num_heads = 6, .num_kv_heads = 2, .window = 11, .sinks = true},
     {.num_kv_heads = 2, .gate = "element", .qk_rmsnorm = "zero_centered_head"},
     {.num_kv_heads = 2, .window = 11, .qk_rmsnorm = "all_heads", .softmax_scale = 0.3},
     {.position = "alibi", .qkv_bias = true, .qk_rmsnorm = "head"},
     {.constants = "keys", .max_positions = 100},
     {.num_kv_heads = 2,
      .position = "none",
      .constants = "queries_and_keys",
      .max_positions = 97}});

}  // namespace
}  // namespace assay::nn
