// Attention that reads the one place that matters most to a query, on unit-length queries and keys.
// [BC §4, §5]
//   q, k, v = W x    q, k ← rotary(q/‖q‖, k/‖k‖)    q ← scale_h q, learned per head
//       out = W_o read(q, k, v)
// The scale starts and learns as in attention.cc.
// top1_element: the value of the position with the largest softmax weight, straight-through
// gradient. top1_chunk: one softmax over the own chunk and the top_k best earlier chunks, which the
// exact or the approximate score chooses. A step of approx reads the summaries of the chunks, which
// are kept, and at most (1 + top_k) chunk_size keys. MoBA is top1_chunk without QK-norm, approx,
// scale 1/√D; its top-k counts the own chunk: ours plus 1. [MoBA, §2.2]
#include <torch/torch.h>

#include <cmath>

#include "nn/layers.h"
#include "nn/mixer.h"
#include "nn/recompute.h"
#include "ops/attention/rotary_qkv/rotary_qkv.h"
#include "ops/attention/top1_chunk/top1_chunk.h"
#include "ops/attention/top1_element/top1_element.h"

namespace assay::nn {
namespace {

struct HeadsConfig {
  int64_t num_heads = 4;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  std::string position = "rope";
  double rope_base = 10000;
  bool qk_norm = true;
  bool bias = false;
  double initial_scale = 20;
  double scale_learning_rate = 40;
  void fields(auto&& field) {
    field("num_heads", num_heads, "query heads");
    field("num_kv_heads", num_kv_heads, "key and value heads; divides num_heads; 0: num_heads");
    field("head_dim", head_dim, "0: d_model / num_heads");
    field("position", position, "rope or none");
    field("rope_base", rope_base, "base of the rotary frequencies");
    field("qk_norm", qk_norm, "unit-length queries and keys, a learned scale per head");
    field("initial_scale", initial_scale, "with qk_norm: where the learned scale starts");
    field("scale_learning_rate", scale_learning_rate,
          "with qk_norm: learning rate of the scale over that of the run");
    field("bias", bias, "biases on the projections");
  }
};

// The projections of both mixers, and their past keys and values.
struct Top1 : ProjectedMixer, HeadwiseMixer {
  using Heads = std::array<at::Tensor, 3>;  // q [B, T, H, D], k and v [B, T, Hk, D]
  Top1(const char* name, HeadsConfig& c, int64_t d_model)
      : heads(expanded(name, c, d_model)), rotary(c.head_dim, c.rope_base) {
    const int64_t inner = c.num_heads * c.head_dim;
    const int64_t kv = c.num_kv_heads * c.head_dim;
    qkv = add_linear("qkv", d_model, inner + 2 * kv, {.bias = c.bias});
    out_proj = add_linear("out_proj", inner, d_model, {.role = Role::output, .bias = c.bias});
    if (c.qk_norm)
      scale = add_parameter("scale", torch::full({c.num_heads}, c.initial_scale),
                            {.learning_rate = c.scale_learning_rate});
  }

  static HeadsConfig& expanded(const char* name, HeadsConfig& c, int64_t d_model) {
    if (c.head_dim == 0) c.head_dim = head_width(name, d_model, c.num_heads);
    if (c.num_kv_heads == 0) c.num_kv_heads = c.num_heads;
    if (c.num_heads < 1 || c.num_kv_heads < 1 || c.num_heads % c.num_kv_heads)
      fail("{}: num_kv_heads = {} must divide num_heads = {}, both positive", name, c.num_kv_heads,
           c.num_heads);
    one_of(name, "position", c.position, {"rope", "none"});
    check_scale(name, c.initial_scale, c.scale_learning_rate);
    if (c.head_dim < 1 || (c.position == "rope" && c.head_dim % 2))
      fail("{}: head_dim = {} must be positive, and even for rope", name, c.head_dim);
    return c;
  }

  // The first token is at the end of the past, which is put in front of k and v.
  Heads with_past(const Heads& heads, State& state) const {
    const auto& [q, k, v] = heads;
    return {q, past_k.append(state, k), past_v.append(state, v)};
  }
  double softmax_scale() const { return heads.qk_norm ? 1 : 1 / std::sqrt(double(heads.head_dim)); }

  Projection input_projection() const override { return qkv->projection(); }
  at::Tensor mix(const at::Tensor& projected, State& state) override {
    const Heads placed = heads_of(projected, past_k.length(state), state);
    if (state.rows.addresses.defined()) return output(decode(placed, state).unsqueeze(0), {});
    const auto body = [this](const Heads& of, State& own) { return read(with_past(of, own), own); };
    return output(by_sequence(placed, state, body).flatten(2), {});
  }
  bool divides_heads(int64_t parts) const override { return heads.num_kv_heads % parts == 0; }
  HeadInputs head_inputs(const at::Tensor& x, int64_t position, State& state) const override {
    const auto [q, k, v] = heads_of(input_projection()(x), position, state);
    return {{q, k, v}, {}};
  }
  at::Tensor attend_whole(const HeadList& some, int64_t /*first*/) override {
    State whole;
    whole.context.last = true;
    return read({some[0], some[1], some[2]}, whole);
  }
  at::Tensor output(const at::Tensor& y, const at::Tensor& /*gate*/) const override {
    return out_proj->forward(y);
  }
  virtual at::Tensor read(const Heads& with_past, State& state) = 0;  // → [B, T, H, D]
  // read() for the new tokens [1, B, heads, D] of a step with State::Rows::addresses → [B, H D].
  // For a mixer that can be captured.
  virtual at::Tensor decode(const Heads&, State&) { fail<Error>("top1: no decode()"); }
  // With norm, scale and rotation, of the projected x, whose first token is at `position`; or
  // [1, B, N] are rows at positions of their own.
  Heads heads_of(const at::Tensor& projected, int64_t position, State& state) const {
    const int64_t kv_heads = heads.num_kv_heads;
    if (heads.position == "rope") {
      const auto [cos, sin] = rotary.angles(projected, position, state);
      const auto norm_scale = heads.qk_norm ? std::optional(scale) : std::nullopt;
      return ops::rotary_qkv_(projected, heads.num_heads, kv_heads, cos, sin, norm_scale);
    }
    const at::Tensor all = split_heads(projected, heads.num_heads + 2 * kv_heads);
    const auto parts = all.split_with_sizes({heads.num_heads, kv_heads, kv_heads}, 2);
    if (!heads.qk_norm) return {parts[0], parts[1], parts[2]};
    const at::Tensor q = unit_length(parts[0]) * scale.to(all.scalar_type()).unsqueeze(-1);
    return {q, unit_length(parts[1]), parts[2]};
  }

  HeadsConfig heads;
  const Cache past_k = add_cache("k");
  const Cache past_v = add_cache("v");
  Rotary rotary;
  std::shared_ptr<Linear> qkv;
  std::shared_ptr<Linear> out_proj;
  at::Tensor scale;  // undefined without QK-norm
};

struct Top1Element final : Top1 {
  using Config = HeadsConfig;
  Top1Element(Config c, int64_t d_model) : Top1("top1_element", c, d_model) {}

  at::Tensor read(const Heads& with_past, State&) override {
    const auto& [q, k, v] = with_past;
    return std::get<0>(ops::top1_element(q, k, v, softmax_scale()));
  }

  // One-hot weights: 1 at the position that is read, 0 elsewhere
  at::Tensor attention_weights(const at::Tensor& x) const override {
    State none;
    const auto [q, k, v] = heads_of(qkv->forward(x), 0, none);
    return std::get<0>(ops::top1_element_reference(q, k, values_of_positions(k), softmax_scale()))
        .transpose(1, 2);
  }

  // Scores, and the softmax's own output for the gradient.
  double mixing_flops(int64_t time) const override {
    return 4.0 * double(heads.num_heads * heads.head_dim) * double(time + 1) / 2;
  }
};

struct Top1Chunk final : Top1 {
  struct Config : HeadsConfig {
    int64_t chunk_size = 128;
    int64_t top_k = 1;
    std::string selection = "exact";
    void fields(auto&& field) {
      HeadsConfig::fields(field);
      field("chunk_size", chunk_size, "positions of a chunk");
      field("selection", selection,
            "exact: the largest share of full attention; approx: the largest q·mean(k)");
      field("top_k", top_k, "earlier chunks that a query reads in addition to its own");
    }
  };

  Top1Chunk(Config c, int64_t d_model) : Top1("top1_chunk", c, d_model), config(c) {
    if (c.chunk_size < 1) fail("top1_chunk: chunk_size = {} must be positive", c.chunk_size);
    if (c.top_k < 1) fail("top1_chunk: top_k = {} must be positive", c.top_k);
    one_of("top1_chunk", "selection", c.selection, {"exact", "approx"});
    if (c.selection == "exact") return;
    const auto none = [size = c.chunk_size](const State& row) {
      return ops::chunk_summaries(row.find("k")->slice(1, 0, 1), size).slice(1, 0, 0);
    };
    past_summaries = add_cache("chunk_summaries", {.tokens = c.chunk_size, .empty = none});
  }

  at::Tensor read(const Heads& with_past, State& state) override {
    const auto& [q, k, v] = with_past;
    const auto [out, logsumexp, chosen] =
        ops::top1_chunk(q, k, v, config.chunk_size, softmax_scale(), config.selection, config.top_k,
                        recalled(), summaries(k, state));
    remember(chosen);
    return out;
  }

  at::Tensor attention_weights(const at::Tensor& x) const override {
    State none;
    const auto [q, k, v] = heads_of(qkv->forward(x), 0, none);
    const auto out = ops::top1_chunk_reference(q, k, values_of_positions(k), config.chunk_size,
                                               softmax_scale(), config.selection, config.top_k);
    return std::get<0>(out).transpose(1, 2);
  }

  bool can_be_captured(const at::TensorOptions& options) const override {
    return ops::top1_chunk_decode_serves(options, heads.head_dim, config.chunk_size,
                                         config.selection, config.top_k);
  }
  at::Tensor decode(const Heads& placed, State& state) override {
    const auto& [q, k, v] = placed;
    return ops::top1_chunk_decode(q[0], k[0], v[0], state.context.rows.on_device,
                                  state.rows.addresses, config.chunk_size, softmax_scale(),
                                  config.selection, config.top_k, state.context.rows.capacity)
        .flatten(1);
  }

  // Summaries of the chunks that are full; those that this piece filled are appended to the state.
  // No value if nothing reads them later.
  std::optional<at::Tensor> summaries(const at::Tensor& k, State& state) const {
    if (!past_summaries || at::GradMode::is_enabled()) return {};
    const int64_t known = past_summaries->length(state);
    const int64_t full = k.size(1) / config.chunk_size;
    if (state.context.last && known == 0) return {};
    if (full == known) return state.find(past_summaries->name());
    return past_summaries->append(
        state, ops::chunk_summaries(k.slice(1, known * config.chunk_size), config.chunk_size));
  }

  // Keys read per query, and what choosing costs: an exact score reads a candidate's keys, an
  // approximate one its mean.
  double mixing_flops(int64_t time) const override {
    const int64_t keys_per_score = config.selection == "exact" ? config.chunk_size : 1;
    double read = 0;
    double scored = 0;
    for (int64_t begin = 0; begin < time; begin += config.chunk_size) {
      const int64_t count = std::min(config.chunk_size, time - begin);
      const int64_t candidates = begin / config.chunk_size;
      read += double(count) * (double(count + 1) / 2 +
                               double(std::min(config.top_k, candidates) * config.chunk_size));
      scored += double(count) * double(candidates * keys_per_score);
    }
    return double(heads.num_heads * heads.head_dim) * (4 * read + 2 * scored) / double(time);
  }

  Config config;
  std::optional<Cache> past_summaries;  // of full chunks, unless the choice is exact
};

const RegisterMixer<Top1Element> element(
    "top1_element",
    "out_t = v_j*, j* = argmax over j ≤ t of q_t·k_j, gradient of the softmax [BC §4]",
    {{}, {.num_heads = 6, .num_kv_heads = 2}, {.position = "none", .bias = true}});

Top1Chunk::Config chunk_example(int64_t chunk_size, std::string selection, int64_t top_k,
                                HeadsConfig heads = {}) {
  Top1Chunk::Config c;
  static_cast<HeadsConfig&>(c) = heads;
  c.chunk_size = chunk_size;
  c.selection = std::move(selection);
  c.top_k = top_k;
  return c;
}
const RegisterMixer<Top1Chunk> chunk(
    "top1_chunk",
    "softmax over the own chunk and the top_k earlier chunks, "
    "those with the largest Σ exp(q·k) or q·mean(k) [BC §5]",
    {{},
     chunk_example(16, "exact", 1, {.num_heads = 6, .num_kv_heads = 2}),
     chunk_example(16, "approx", 1, {.num_heads = 8}),
     chunk_example(7, "exact", 2, {.position = "none", .bias = true}),
     // MoBA with top-k 4
     chunk_example(10, "approx", 3, {.num_heads = 6, .num_kv_heads = 3, .qk_norm = false})});

}  // namespace
}  // namespace assay::nn
