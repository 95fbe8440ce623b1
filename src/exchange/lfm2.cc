// LFM2: short convolutions with a gate on each side, and attention with norms of queries and keys.
#include "exchange/decoder.h"

namespace assay::exchange {
namespace {

const DecoderLayout kLayout = {
    .architecture = "Lfm2ForCausalLM",
    .kinds = {{"full_attention", "attention"}, {"conv", "base_conv"}},
    .eps = "norm_eps",
    .absent_eps = 1e-5,
    .absent_rope_base = 1e6,
    .absent_tie = true,
    .qk_rmsnorm = "head",
    .mixer_norm = "operator_norm",
    .channel_norm = "ffn_norm",
    .final_norm = "embedding_norm",
    .out_proj = "out_proj",
    .q_norm = "q_layernorm",
    .k_norm = "k_layernorm",
};

// Without layer_types, full_attn_idxs lists the layers of attention; without both, all are.
Names kinds_by_index(const Settings& s) {
  const auto attention = s.get<nlohmann::json>("full_attn_idxs", nullptr);
  Names kinds = each_nth(s, "", 1, kLayout);
  for (size_t i = 0; i < kinds.size() && !attention.is_null(); ++i)
    if (std::ranges::find(attention, nlohmann::json(i)) == attention.end()) kinds[i] = "conv";
  return kinds;
}

Value hidden_width(const Settings& s) {
  const std::string key = s.has("block_ff_dim") ? "block_ff_dim" : "intermediate_size";
  auto width = s.get<int64_t>(key);
  if (s.get<bool>("block_auto_adjust_ff_dim", true)) {
    const auto multiple = std::max<int64_t>(s.get<int64_t>("block_multiple_of", 256), 1);
    width = int64_t(s.get<double>("block_ffn_dim_multiplier", 1) * double(2 * width / 3));
    width = (width + multiple - 1) / multiple * multiple;
  }
  return {"swiglu.d_ff", width, s.place(key)};
}

std::vector<Value> values(const Settings& s) {
  const Names pattern = pattern_of(s, kLayout, kinds_by_index(s));
  std::vector<Value> out = decoder_values(s, kLayout, pattern);
  if (s.has("tie_embedding")) out.push_back(s.as<bool>("tie_embeddings", "tie_embedding"));
  out.push_back({"channel_mixer", "swiglu"});
  out.push_back(hidden_width(s));
  if (!has_mixer(pattern, "base_conv")) return out;
  out.push_back({"base_conv.form", "lfm2"});
  out.push_back(s.as<int64_t>("base_conv.conv_width", "conv_L_cache", 3));
  out.push_back(s.as<bool>("base_conv.conv_bias", "conv_bias", false));
  return out;
}

nlohmann::json config(const Expanded& m) {
  nlohmann::json out = decoder_config(m, kLayout);
  if (!m.has("base_conv")) fail("model.pattern must name base_conv");
  out.update({{"conv_L_cache", m.get<int64_t>("base_conv.conv_width")},
              {"conv_bias", m.get<bool>("base_conv.conv_bias")}});
  if (m.has("attention") &&
      attention_shape(m).heads * attention_shape(m).head_dim != m.get<int64_t>("d_model"))
    fail("model.attention.head_dim must be d_model / num_heads");
  out.update(
      {{"block_auto_adjust_ff_dim", false}, {"intermediate_size", gated_width(m, "swiglu")}});
  return out;
}

void add_layer(std::vector<Rule>& out, const Expanded& m, const std::string& mixer,
               const std::string& ours, const std::string& theirs) {
  const std::string f = theirs + "feed_forward.";
  out.push_back({ours + "channel_mixer.in_proj.weight", {{f + "w1.weight"}, {f + "w3.weight"}}});
  out.push_back({ours + "channel_mixer.out_proj.weight", {{f + "w2.weight"}}});
  if (mixer != "base_conv") return;
  const auto add = [&](const std::string& kind, Layout of_conv) {
    out.push_back({ours + "mixer.conv." + kind, {{theirs + "conv.conv." + kind, 1, of_conv}}});
    for (const std::string same : {"in_proj.", "out_proj."})
      out.push_back({ours + "mixer." + same + kind, {{theirs + "conv." + same + kind}}});
  };
  add("weight", Layout::unsqueezed);
  if (m.get<bool>("base_conv.conv_bias")) add("bias", Layout::same);
}

std::vector<Requirement> requirements() {
  auto out = decoder_requirements(kLayout);
  out.push_back({"attention.bias", {"false"}});
  out.push_back({"base_conv.form", {"\"lfm2\""}});
  return out;
}

const bool registered = families().add(
    "lfm2", {.prefix = "model.",
             .left_out = {},
             .requires_ = requirements(),
             .values = values,
             .config = config,
             .rules = [](const Expanded& m) { return decoder_rules(m, kLayout, add_layer); }});

}  // namespace
}  // namespace assay::exchange
