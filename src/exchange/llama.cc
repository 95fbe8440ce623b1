// Llama: rotary positions on the two halves of a head, RMSNorm, a gated feed-forward layer, grouped
// key and value heads. hidden_act "silu" is our swiglu, "gelu_pytorch_tanh" our geglu.
#include "exchange/family.h"

namespace assay::exchange {
namespace {

Value rope_base(const Settings& s) {
  s.expect("partial_rotary_factor", {1.0});
  // Transformers 5; before, rope_theta was at the top, next to rope_scaling
  const Settings rope = s.child("rope_parameters");
  const Settings scaling = s.child("rope_scaling");
  for (const Settings& settings : {rope, scaling})
    for (const char* kind : {"rope_type", "type"}) settings.expect(kind, {"default"});
  rope.expect("partial_rotary_factor", {1.0});
  rope.expect_only({"rope_theta", "rope_type", "type", "partial_rotary_factor"});
  scaling.expect_only({"rope_type", "type"});
  const std::string ours = "attention.rope_base";
  return rope.has("rope_theta") ? rope.as<double>(ours, "rope_theta")
                                : s.as<double>(ours, "rope_theta", 10000);
}

std::vector<Value> values(const Settings& s) {
  s.expect("hidden_act", {"silu", "gelu_pytorch_tanh", "gelu_new"});
  const std::string mixer = s.get<std::string>("hidden_act", "silu") == "silu" ? "swiglu" : "geglu";
  const auto heads = s.get<int64_t>("num_attention_heads");
  return {s.as<int64_t>("vocab_size", "vocab_size"),
          s.as<int64_t>("d_model", "hidden_size"),
          s.as<int64_t>("num_layers", "num_hidden_layers"),
          {"pattern", Names{"attention"}},
          {"channel_mixer", mixer, s.place("hidden_act")},
          {"norm", "rmsnorm"},
          s.as<double>("norm_eps", "rms_norm_eps", 1e-6),
          s.as<int64_t>("max_positions", "max_position_embeddings", 2048),
          s.as<bool>("tie_embeddings", "tie_word_embeddings", false),
          s.as<int64_t>("attention.num_heads", "num_attention_heads"),
          s.as<int64_t>("attention.num_kv_heads", "num_key_value_heads", heads),
          s.as<int64_t>("attention.head_dim", "head_dim", 0),
          rope_base(s),
          s.as<bool>("attention.bias", "attention_bias", false),
          s.as<int64_t>(mixer + ".d_ff", "intermediate_size"),
          s.as<bool>(mixer + ".bias", "mlp_bias", false)};
}

std::string channel_mixer(const Expanded& m) { return m.get<std::string>("channel_mixer"); }

nlohmann::json config(const Expanded& m) {
  const AttentionShape shape = attention_shape(m);
  const std::string mixer = channel_mixer(m);
  const auto width = m.get<int64_t>("d_model");
  const auto hidden = m.get<int64_t>(mixer + ".d_ff");
  const auto longest = m.get<int64_t>("max_positions");
  return {{"architectures", {"LlamaForCausalLM"}},
          {"attention_bias", m.get<bool>("attention.bias")},
          {"attention_dropout", 0.0},
          {"head_dim", shape.head_dim},
          {"hidden_act", mixer == "swiglu" ? "silu" : "gelu_pytorch_tanh"},
          {"hidden_size", width},
          {"intermediate_size", hidden ? hidden : (width * 8 / 3 + 63) / 64 * 64},
          {"max_position_embeddings", longest ? longest : 2048},
          {"mlp_bias", m.get<bool>(mixer + ".bias")},
          {"num_attention_heads", shape.heads},
          {"num_hidden_layers", m.get<int64_t>("num_layers")},
          {"num_key_value_heads", shape.kv_heads},
          {"rms_norm_eps", m.get<double>("norm_eps")},
          {"rope_parameters",
           {{"rope_theta", m.get<double>("attention.rope_base")}, {"rope_type", "default"}}},
          {"rope_theta", m.get<double>("attention.rope_base")},
          {"tie_word_embeddings", m.get<bool>("tie_embeddings")}};
}

std::vector<Rule> rules(const Expanded& m) {
  const AttentionShape shape = attention_shape(m);
  std::vector<Rule> out = {{"embedding", {{"model.embed_tokens.weight"}}},
                           {"norm.weight", {{"model.norm.weight"}}}};
  if (!m.get<bool>("tie_embeddings")) out.push_back({"head.weight", {{"lm_head.weight"}}});
  for (int64_t i = 0; i < m.get<int64_t>("num_layers"); ++i) {
    const std::string ours = fmt::format("layers_{}.", i);
    const std::string theirs = fmt::format("model.layers.{}.", i);
    const auto projections = [&](const std::string& kind, bool mixer, bool channel) {
      const std::string a = theirs + "self_attn.";
      const std::string f = theirs + "mlp.";
      if (mixer) {
        out.push_back({ours + "mixer.qkv." + kind,
                       {{a + "q_proj." + kind, shape.heads},
                        {a + "k_proj." + kind, shape.kv_heads},
                        {a + "v_proj." + kind, shape.kv_heads}}});
        out.push_back({ours + "mixer.out_proj." + kind, {{a + "o_proj." + kind}}});
      }
      if (channel) {
        out.push_back({ours + "channel_mixer.in_proj." + kind,
                       {{f + "gate_proj." + kind}, {f + "up_proj." + kind}}});
        out.push_back({ours + "channel_mixer.out_proj." + kind, {{f + "down_proj." + kind}}});
      }
    };
    out.push_back({ours + "mixer_norm.weight", {{theirs + "input_layernorm.weight"}}});
    out.push_back({ours + "channel_norm.weight", {{theirs + "post_attention_layernorm.weight"}}});
    projections("weight", true, true);
    projections("bias", m.get<bool>("attention.bias"), m.get<bool>(channel_mixer(m) + ".bias"));
  }
  return out;
}

const bool registered =
    families().add("llama", {.prefix = "model.",
                             .left_out = {R"(rotary_emb\.inv_freq)"},
                             .requires_ = {{"pattern", {"[\"attention\"]"}},
                                           {"channel_mixer", {"\"swiglu\"", "\"geglu\""}},
                                           {"norm", {"\"rmsnorm\""}},
                                           {"embedding_norm", {"false"}},
                                           {"positions", {"\"none\""}},
                                           {"attention.window", {"-1"}},
                                           {"attention.position", {"\"rope\""}},
                                           {"attention.rotary_fraction", {"1.0"}},
                                           {"attention.gate", {"\"none\""}},
                                           {"attention.qk_norm", {"false"}},
                                           {"attention.constants", {"\"none\""}}},
                             .values = values,
                             .config = config,
                             .rules = rules});

}  // namespace
}  // namespace assay::exchange
