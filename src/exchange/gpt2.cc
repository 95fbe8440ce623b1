// GPT-2: learned positions, LayerNorm, GELU (tanh form), biases, tied head; projections are
// stored [in, out].
#include "exchange/family.h"

namespace assay::exchange {
namespace {

std::vector<Value> values(const Settings& s) {
  s.expect("activation_function", {"gelu_new", "gelu_pytorch_tanh"});
  s.expect("add_cross_attention", {false});
  s.expect("scale_attn_by_inverse_layer_idx", {false});
  s.expect("scale_attn_weights", {true});
  s.expect("tie_word_embeddings", {true});
  return {s.as<int64_t>("vocab_size", "vocab_size"),
          s.as<int64_t>("d_model", "n_embd"),
          s.as<int64_t>("num_layers", "n_layer"),
          {"pattern", Names{"attention"}},
          {"channel_mixer", "gelu"},
          {"norm", "layernorm"},
          s.as<double>("norm_eps", "layer_norm_epsilon", 1e-5),
          {"positions", "learned"},
          s.as<int64_t>("max_positions", "n_positions", 1024),
          s.as<int64_t>("attention.num_heads", "n_head"),
          {"attention.position", "none"},
          {"attention.bias", true},
          s.as<int64_t>("gelu.d_ff", "n_inner", 0),
          {"gelu.bias", true}};
}

nlohmann::json config(const Expanded& m) {
  const auto width = m.get<int64_t>("d_model");
  const auto hidden = m.get<int64_t>("gelu.d_ff");
  const AttentionShape shape = attention_shape(m);
  if (shape.kv_heads != shape.heads) fail("model.attention.num_kv_heads must be num_heads");
  if (shape.heads * shape.head_dim != width)
    fail("model.attention.head_dim must be d_model / num_heads");
  return {{"architectures", {"GPT2LMHeadModel"}},
          {"activation_function", "gelu_new"},
          {"attn_pdrop", 0.0},
          {"embd_pdrop", 0.0},
          {"resid_pdrop", 0.0},
          {"layer_norm_epsilon", m.get<double>("norm_eps")},
          {"n_embd", width},
          {"n_head", shape.heads},
          {"n_inner", hidden && hidden != 4 * width ? nlohmann::json(hidden) : nlohmann::json()},
          {"n_layer", m.get<int64_t>("num_layers")},
          {"n_positions", m.get<int64_t>("max_positions")},
          {"tie_word_embeddings", true}};
}

std::vector<Rule> rules(const Expanded& m) {
  std::vector<Rule> out = {{"embedding", {{"transformer.wte.weight"}}},
                           {"positions", {{"transformer.wpe.weight"}}}};
  const auto add = [&](const std::string& ours, const std::string& theirs, Layout layout) {
    out.push_back({ours + ".weight", {{theirs + ".weight", 1, layout}}});
    out.push_back({ours + ".bias", {{theirs + ".bias"}}});
  };
  for (int64_t i = 0; i < m.get<int64_t>("num_layers"); ++i) {
    const std::string ours = fmt::format("layers_{}.", i);
    const std::string theirs = fmt::format("transformer.h.{}.", i);
    add(ours + "mixer_norm", theirs + "ln_1", Layout::same);
    add(ours + "mixer.qkv", theirs + "attn.c_attn", Layout::transposed);
    add(ours + "mixer.out_proj", theirs + "attn.c_proj", Layout::transposed);
    add(ours + "channel_norm", theirs + "ln_2", Layout::same);
    add(ours + "channel_mixer.in_proj", theirs + "mlp.c_fc", Layout::transposed);
    add(ours + "channel_mixer.out_proj", theirs + "mlp.c_proj", Layout::transposed);
  }
  add("norm", "transformer.ln_f", Layout::same);
  return out;
}

const bool registered = families().add("gpt2", {.prefix = "transformer.",
                                                .left_out = {R"(\.attn\.(bias|masked_bias))"},
                                                .requires_ = {{"pattern", {"[\"attention\"]"}},
                                                              {"channel_mixer", {"\"gelu\""}},
                                                              {"norm", {"\"layernorm\""}},
                                                              {"positions", {"\"learned\""}},
                                                              {"tie_embeddings", {"true"}},
                                                              {"attention.position", {"\"none\""}},
                                                              {"attention.bias", {"true"}},
                                                              {"gelu.bias", {"true"}}},
                                                .values = values,
                                                .config = config,
                                                .rules = rules});

}  // namespace
}  // namespace assay::exchange
