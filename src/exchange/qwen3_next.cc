// Qwen3-Next where every layer is a gated delta net and every feed-forward layer is dense.
#include "exchange/family.h"

namespace assay::exchange {
namespace {

// Every layer's kind must be written out and linear; absent, transformers makes each fourth
// an attention layer.
void expect_linear_layers(const Settings& s, int64_t layers) {
  const auto kinds = s.get<nlohmann::json>("layer_types");
  const auto linear = [](const nlohmann::json& kind) { return kind == "linear_attention"; };
  if (!kinds.is_array() || int64_t(kinds.size()) != layers || !std::ranges::all_of(kinds, linear))
    s.expect("layer_types", {"linear_attention in every layer"});
}

std::vector<Value> values(const Settings& s) {
  s.expect("hidden_act", {"silu"});
  s.expect("num_experts", {0});
  expect_linear_layers(s, s.get<int64_t>("num_hidden_layers"));
  return {s.as<int64_t>("vocab_size", "vocab_size"),
          s.as<int64_t>("d_model", "hidden_size"),
          s.as<int64_t>("num_layers", "num_hidden_layers"),
          {"pattern", Names{"gated_delta_net"}},
          {"channel_mixer", "swiglu"},
          {"norm", "zero_centered_rmsnorm"},
          s.as<double>("norm_eps", "rms_norm_eps", 1e-6),
          s.as<bool>("tie_embeddings", "tie_word_embeddings", false),
          s.as<int64_t>("gated_delta_net.num_heads", "linear_num_value_heads"),
          s.as<int64_t>("gated_delta_net.num_key_heads", "linear_num_key_heads"),
          s.as<int64_t>("gated_delta_net.head_dim", "linear_key_head_dim"),
          s.as<int64_t>("gated_delta_net.value_head_dim", "linear_value_head_dim"),
          s.as<int64_t>("gated_delta_net.conv_width", "linear_conv_kernel_dim", 4),
          s.as<double>("gated_delta_net.norm_eps", "rms_norm_eps", 1e-6),
          s.as<int64_t>("swiglu.d_ff", "intermediate_size")};
}

nlohmann::json config(const Expanded& m) {
  const DeltaShape shape = delta_shape(m);
  const auto layers = m.get<int64_t>("num_layers");
  if (m.get<double>("gated_delta_net.norm_eps") != m.get<double>("norm_eps"))
    fail("model.gated_delta_net.norm_eps must be model.norm_eps");
  if (m.get<int64_t>("gated_delta_net.conv_width") == 0)
    fail("model.gated_delta_net.conv_width must be positive");
  std::vector<int64_t> dense;
  for (int64_t i = 0; i < layers; ++i) dense.push_back(i);
  return {{"architectures", {"Qwen3NextForCausalLM"}},
          {"decoder_sparse_step", 1},
          {"hidden_act", "silu"},
          {"hidden_size", m.get<int64_t>("d_model")},
          {"intermediate_size", gated_width(m, "swiglu")},
          {"layer_types", std::vector<std::string>(size_t(layers), "linear_attention")},
          {"linear_conv_kernel_dim", m.get<int64_t>("gated_delta_net.conv_width")},
          {"linear_key_head_dim", shape.key_dim},
          {"linear_num_key_heads", shape.key_heads},
          {"linear_num_value_heads", shape.heads},
          {"linear_value_head_dim", shape.value_dim},
          {"mlp_only_layers", dense},
          {"num_experts", 0},
          {"num_hidden_layers", layers},
          {"rms_norm_eps", m.get<double>("norm_eps")},
          {"tie_word_embeddings", m.get<bool>("tie_embeddings")},
          // With a cache, transformers 5.24 needs an attention layer, and there is none here
          {"use_cache", false}};
}

std::vector<Rule> rules(const Expanded& m) {
  const DeltaShape shape = delta_shape(m);
  // Heads that share one key head, and the width of their values
  const int64_t shared = shape.heads / shape.key_heads;
  const int64_t values = shared * shape.value_dim;
  std::vector<Rule> out = {{"embedding", {{"model.embed_tokens.weight"}}},
                           {"norm.weight", {{"model.norm.weight"}}}};
  if (!m.get<bool>("tie_embeddings")) out.push_back({"head.weight", {{"lm_head.weight"}}});
  for (int64_t i = 0; i < m.get<int64_t>("num_layers"); ++i) {
    const std::string ours = fmt::format("layers_{}.", i);
    const std::string theirs = fmt::format("model.layers.{}.", i);
    const std::string a = theirs + "linear_attn.";
    out.push_back({ours + "mixer_norm.weight", {{theirs + "input_layernorm.weight"}}});
    out.push_back({ours + "channel_norm.weight", {{theirs + "post_attention_layernorm.weight"}}});
    out.push_back({ours + "mixer.qkvz_proj.weight",
                   {{a + "in_proj_qkvz.weight",
                     1,
                     Layout::same,
                     {shape.key_dim, shape.key_dim, values, values},
                     shape.key_heads}}});
    out.push_back(
        {ours + "mixer.ba_proj.weight",
         {{a + "in_proj_ba.weight", 1, Layout::same, {shared, shared}, shape.key_heads}}});
    out.push_back({ours + "mixer.conv.weight", {{a + "conv1d.weight", 1, Layout::unsqueezed}}});
    for (const char* same : {"A_log", "dt_bias", "norm.weight", "out_proj.weight"})
      out.push_back({ours + "mixer." + same, {{a + same}}});
    add_gated_mlp(out, ours, theirs);
  }
  return out;
}

const bool registered =
    families().add("qwen3_next", {.prefix = "model.",
                                  .left_out = {},
                                  .requires_ = {{"pattern", {"[\"gated_delta_net\"]"}},
                                                {"channel_mixer", {"\"swiglu\""}},
                                                {"swiglu.bias", {"false"}},
                                                {"norm", {"\"zero_centered_rmsnorm\""}},
                                                {"embedding_norm", {"false"}},
                                                {"positions", {"\"none\""}}},
                                  .values = values,
                                  .config = config,
                                  .rules = rules});

}  // namespace
}  // namespace assay::exchange
