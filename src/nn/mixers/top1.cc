// Attention that reads the one place that matters most to a query, on unit-length queries and keys.        [BC §4, §5]
//   q, k, v = W x;  q, k ← rotary(q/‖q‖, k/‖k‖);  q ← scale_h q, learned a head, starting at √D;  out = W_o read(q, k,
//   v)
// top1_element: the value of the position with the largest softmax weight, straight-through gradient.
// top1_chunk: one softmax over the own chunk and the top_k best earlier chunks, which the exact or the approximate
// score chooses. A step of the approximate one reads the means of the chunks and at most (1 + top_k) chunk_size keys.
// MoBA is top1_chunk without QK-norm, approx, scale 1/√D; its top-k counts the own chunk and is ours plus 1. [MoBA,
// §2.2]
#include <torch/torch.h>

#include <cmath>

#include "nn/cache.h"
#include "nn/layers.h"
#include "nn/mixer.h"
#include "ops/top1_chunk/top1_chunk.h"
#include "ops/top1_element/top1_element.h"

namespace assay::nn {
namespace {

struct HeadsConfig {
  int64_t num_heads = 4, num_kv_heads = 0, head_dim = 0;
  std::string position = "rope";
  double rope_base = 10000;
  bool qk_norm = true, bias = false;
  void fields(auto&& field) {
    field("num_heads", num_heads, "query heads");
    field("num_kv_heads", num_kv_heads, "key and value heads; divides num_heads; 0: num_heads");
    field("head_dim", head_dim, "0: d_model / num_heads");
    field("position", position, "rope or none");
    field("rope_base", rope_base, "base of the rotary frequencies");
    field("qk_norm", qk_norm, "unit-length queries and keys, a learned scale per head");
    field("bias", bias, "biases on the projections");
  }
};

// The projections of both mixers, and their past keys and values.
struct Top1 : Mixer {
  Top1(const char* name, HeadsConfig& c, int64_t d_model)
      : heads(expanded(name, c, d_model)), rotary(c.head_dim, c.rope_base) {
    const int64_t inner = c.num_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim;
    qkv = register_module("qkv", std::make_shared<Linear>(d_model, inner + 2 * kv, c.bias));
    out_proj = register_module("out_proj", std::make_shared<Linear>(inner, d_model, c.bias));
    if (c.qk_norm) scale = register_parameter("scale", torch::full({c.num_heads}, std::sqrt(double(c.head_dim))));
  }

  static HeadsConfig& expanded(const char* name, HeadsConfig& c, int64_t d_model) {
    if (c.head_dim == 0) c.head_dim = head_width(name, d_model, c.num_heads);
    if (c.num_kv_heads == 0) c.num_kv_heads = c.num_heads;
    if (c.num_heads < 1 || c.num_kv_heads < 1 || c.num_heads % c.num_kv_heads)
      fail("{}: num_kv_heads = {} must divide num_heads = {}, both positive", name, c.num_kv_heads, c.num_heads);
    one_of(name, "position", c.position, {"rope", "none"});
    if (c.head_dim < 1 || (c.position == "rope" && c.head_dim % 2))
      fail("{}: head_dim = {} must be positive, and even for rope", name, c.head_dim);
    return c;
  }

  struct Projected {
    at::Tensor q, k, v;  // [B, T, H, D]; [B, S, Hk, D] with the past in front
    double softmax_scale;
  };
  Projected project(const at::Tensor& x, State& state) const {
    const auto parts = split_heads(qkv->forward(x), heads.num_heads + 2 * heads.num_kv_heads)
                           .split_with_sizes({heads.num_heads, heads.num_kv_heads, heads.num_kv_heads}, 2);
    at::Tensor q = parts[0], k = parts[1];
    const auto past = state.find("k");
    const int64_t position = past ? past->size(1) : 0;
    if (heads.qk_norm) q = unit_length(q) * scale.to(q.scalar_type()).unsqueeze(-1), k = unit_length(k);
    if (heads.position == "rope") q = rotary(q, position), k = rotary(k, position);
    return {q, append(state, "k", k), append(state, "v", parts[2]),
            heads.qk_norm ? 1 : 1 / std::sqrt(double(heads.head_dim))};
  }

  HeadsConfig heads;
  Rotary rotary;
  std::shared_ptr<Linear> qkv, out_proj;
  at::Tensor scale;  // undefined without QK-norm
};

struct Top1Element final : Top1 {
  using Config = HeadsConfig;
  Top1Element(Config c, int64_t d_model) : Top1("top1_element", c, d_model) {}

  at::Tensor forward(const at::Tensor& x, State& state) override {
    const auto [q, k, v, softmax_scale] = project(x, state);
    return out_proj->forward(std::get<0>(ops::top1_element(q, k, v, softmax_scale)).flatten(2));
  }

  // Scores, and the softmax's own output for the gradient.
  double mixing_flops(int64_t time) const override {
    return 4.0 * double(heads.num_heads * heads.head_dim) * double(time + 1) / 2;
  }
};

struct Top1Chunk final : Top1 {
  struct Config : HeadsConfig {
    int64_t chunk_size = 128, top_k = 1;
    std::string selection = "exact";
    void fields(auto&& field) {
      HeadsConfig::fields(field);
      field("chunk_size", chunk_size, "positions of a chunk");
      field("selection", selection, "exact: the largest share of full attention; approx: the largest q·mean(k)");
      field("top_k", top_k, "earlier chunks that a query reads beside its own");
    }
  };

  Top1Chunk(Config c, int64_t d_model) : Top1("top1_chunk", c, d_model), config(c) {
    if (c.chunk_size < 1) fail("top1_chunk: chunk_size = {} must be positive", c.chunk_size);
    if (c.top_k < 1) fail("top1_chunk: top_k = {} must be positive", c.top_k);
    one_of("top1_chunk", "selection", c.selection, {"exact", "approx"});
  }

  at::Tensor forward(const at::Tensor& x, State& state) override {
    const auto [q, k, v, softmax_scale] = project(x, state);
    if (approx()) append_means(k, state);
    const auto out = ops::top1_chunk(q, k, v, config.chunk_size, softmax_scale, config.selection, config.top_k);
    return out_proj->forward(std::get<0>(out).flatten(2));
  }

  // Reads the own chunk and the chosen ones; beyond them, all keys when exact and the means when not.
  at::Tensor step(const at::Tensor& x, State& state) override {
    const auto [q, k, v, softmax_scale] = project(x.unsqueeze(1), state);
    if (approx()) append_means(k, state);
    const int64_t begin = (k.size(1) - 1) / config.chunk_size * config.chunk_size;  // of the own chunk
    at::Tensor keys = to_query_heads(k.slice(1, begin)), values = to_query_heads(v.slice(1, begin));
    if (begin > 0) {
      const at::Tensor chosen = choose(q.squeeze(1), k, softmax_scale, state);
      keys = at::cat({gather(k, chosen), keys}, 2), values = at::cat({gather(v, chosen), values}, 2);
    }
    const at::Tensor out =
        at::scaled_dot_product_attention(q.transpose(1, 2), keys, values, {}, 0.0, false, softmax_scale);
    return out_proj->forward(out.flatten(1));
  }

  bool approx() const { return config.selection == "approx"; }
  int64_t group() const { return heads.num_heads / heads.num_kv_heads; }
  at::Tensor to_query_heads(const at::Tensor& x) const {  // [B, L, Hk, D] → [B, H, L, D]
    return x.transpose(1, 2).repeat_interleave(group(), 1);
  }
  at::Tensor in_chunks(const at::Tensor& x, int64_t first, int64_t last) const {  // [B, last − first, C, Hk, D]
    return x.slice(1, first * config.chunk_size, last * config.chunk_size)
        .unflatten(1, {last - first, config.chunk_size});
  }

  // The means of the chunks that this piece filled join the state: [B, full chunks, Hk, D].
  void append_means(const at::Tensor& k, State& state) const {
    const at::NoGradGuard no_grad;
    const auto past = state.find("mean");
    const int64_t known = past ? past->size(1) : 0, full = k.size(1) / config.chunk_size;
    if (full > known) append(state, "mean", wide(in_chunks(k, known, full)).mean(2));
  }

  // The chunks that the newest position reads beside its own, [B, H, at most top_k]; q [B, H, D].
  at::Tensor choose(const at::Tensor& q, const at::Tensor& k, double softmax_scale, const State& state) const {
    const at::NoGradGuard no_grad;
    const int64_t candidates = (k.size(1) - 1) / config.chunk_size;
    const at::Tensor query = wide(q).unsqueeze(2);  // [B, H, 1, D]
    const auto scores = [&](const at::Tensor& keys) { return query.matmul(to_query_heads(keys).mT()).squeeze(2); };
    const at::Tensor score = approx() ? scores(state.find("mean")->slice(1, 0, candidates))
                                      : (softmax_scale * scores(wide(k.slice(1, 0, candidates * config.chunk_size))))
                                            .unflatten(2, {candidates, config.chunk_size})
                                            .logsumexp(-1);  // [B, H, candidates]
    return std::get<1>(score.sort(/*stable=*/true, -1, /*descending=*/true)).slice(-1, 0, config.top_k);
  }

  // The chosen chunks of each head, [B, H, top_k · C, D].
  at::Tensor gather(const at::Tensor& x, const at::Tensor& chosen) const {
    const auto options = chosen.options();
    const at::Tensor batch = at::arange(x.size(0), options).view({-1, 1, 1});
    const at::Tensor head = at::arange(heads.num_heads, options).floor_divide(group()).view({1, -1, 1});
    const at::Tensor chunks = in_chunks(x, 0, x.size(1) / config.chunk_size).transpose(2, 3);  // [B, chunks, Hk, C, D]
    return chunks.index({batch, chosen, head}).flatten(2, 3);
  }

  // Keys read a query, and what choosing costs: an exact score reads a candidate's keys, an approximate one its mean.
  double mixing_flops(int64_t time) const override {
    double read = 0, scored = 0;
    for (int64_t begin = 0; begin < time; begin += config.chunk_size) {
      const int64_t count = std::min(config.chunk_size, time - begin), candidates = begin / config.chunk_size;
      read += double(count) * (double(count + 1) / 2 + double(std::min(config.top_k, candidates) * config.chunk_size));
      scored += double(count) * double(candidates) * (approx() ? 1 : double(config.chunk_size));
    }
    return double(heads.num_heads * heads.head_dim) * (4 * read + 2 * scored) / double(time);
  }

  Config config;
};

const RegisterMixer<Top1Element> element(
    "top1_element", "out_t = v_j*, j* = argmax over j ≤ t of q_t·k_j, gradient of the softmax [BC §4]",
    {{}, {.num_heads = 6, .num_kv_heads = 2}, {.position = "none", .bias = true}});

Top1Chunk::Config chunk_example(int64_t chunk_size, std::string selection, int64_t top_k, HeadsConfig heads = {}) {
  Top1Chunk::Config c;
  static_cast<HeadsConfig&>(c) = heads;
  c.chunk_size = chunk_size, c.selection = std::move(selection), c.top_k = top_k;
  return c;
}
const RegisterMixer<Top1Chunk> chunk(
    "top1_chunk",
    "softmax over the own chunk and the top_k earlier chunks with the largest Σ exp(q·k) or q·mean(k) [BC §5]",
    {{},
     chunk_example(16, "exact", 1, {.num_heads = 6, .num_kv_heads = 2}),
     chunk_example(16, "approx", 1),
     chunk_example(7, "exact", 2, {.position = "none", .bias = true}),
     chunk_example(10, "approx", 3, {.num_heads = 6, .num_kv_heads = 3, .qk_norm = false})});  // MoBA with top-k 4

}  // namespace
}  // namespace assay::nn
