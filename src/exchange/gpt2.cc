// GPT-2: learned positions, LayerNorm, GELU (tanh form), biases, tied head; projections are
// stored [in, out].
#include "exchange/family.h"

namespace assay::exchange {
namespace {

std::string toml(const Settings& s) {
  s.expect("activation_function", {"gelu_new", "gelu_pytorch_tanh"});
  s.expect("add_cross_attention", {false});
  s.expect("scale_attn_by_inverse_layer_idx", {false});
  s.expect("scale_attn_weights", {true});
  s.expect("tie_word_embeddings", {true});
  return fmt::format(
      "[model]\nvocab_size = {}\nd_model = {}\nnum_layers = {}\npattern = [\"attention\"]\n"
      "channel_mixer = \"gelu\"\n"
      "norm = \"layernorm\"\nnorm_eps = {}\npositions = \"learned\"\nmax_positions = {}\n"
      "[model.attention]\nnum_heads = {}\nposition = \"none\"\nbias = true\n[model.gelu]\n"
      "d_ff = {}\nbias = true\n",
      s.get<int64_t>("vocab_size"), s.get<int64_t>("n_embd"), s.get<int64_t>("n_layer"),
      s.get<double>("layer_norm_epsilon", 1e-5), s.get<int64_t>("n_positions", 1024),
      s.get<int64_t>("n_head"), s.get<int64_t>("n_inner", 0));
}

nlohmann::json config(const Expanded& m) {
  const auto width = m.get<int64_t>("d_model"), hidden = m.get<int64_t>("gelu.d_ff");
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
    const std::string ours = fmt::format("layers_{}.", i),
                      theirs = fmt::format("transformer.h.{}.", i);
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
                                                .left_out = {".attn.bias", ".attn.masked_bias"},
                                                .requires_ = {{"pattern", {"[\"attention\"]"}},
                                                              {"channel_mixer", {"\"gelu\""}},
                                                              {"norm", {"\"layernorm\""}},
                                                              {"embedding_norm", {"false"}},
                                                              {"positions", {"\"learned\""}},
                                                              {"tie_embeddings", {"true"}},
                                                              {"attention.window", {"-1"}},
                                                              {"attention.position", {"\"none\""}},
                                                              {"attention.qk_norm", {"false"}},
                                                              {"attention.constants", {"\"none\""}},
                                                              {"attention.bias", {"true"}},
                                                              {"gelu.bias", {"true"}}},
                                                .toml = toml,
                                                .config = config,
                                                .rules = rules});

}  // namespace
}  // namespace assay::exchange
