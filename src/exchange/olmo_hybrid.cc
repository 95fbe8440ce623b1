// OLMo Hybrid: layers of the gated delta net with norms before its parts, and layers of attention
// with norms after them and over all heads of queries and keys.
#include "exchange/decoder.h"

namespace assay::exchange {
namespace {

const DecoderLayout kLayout = {
    .architecture = "OlmoHybridForCausalLM",
    .kinds = {{"full_attention", "attention", "post_attention_layernorm",
               "post_feedforward_layernorm"},
              {"linear_attention", "gated_delta_net", "attention_layer_norm",
               "feedforward_layer_norm"}},
    .qk_rmsnorm = "all_heads",
    .optional_positions = true,
    .post_norm = true,
};

std::vector<Value> values(const Settings& s) {
  s.expect("hidden_act", {"silu"});
  Names absent = each_nth(s, "", 4, kLayout);
  if (absent.size() < 4) absent.back() = kLayout.kinds[0].theirs;
  const Names pattern = pattern_of(s, kLayout, absent);
  for (const LayerKind& kind : kLayout.kinds)
    if (!has_mixer(pattern, kind.mixer))
      fail("{}: one layer must be of the kind '{}'. Nothing was written.", s.place("layer_types"),
           kind.theirs);
  std::vector<Value> out = decoder_values(s, kLayout, pattern);
  const auto heads = s.get<int64_t>("num_attention_heads");
  const auto key_heads = std::max<int64_t>(s.get<int64_t>("linear_num_key_heads", heads), 1);
  const int64_t width = 3 * s.get<int64_t>("hidden_size") / 4 / key_heads;
  const auto key_dim = s.get<int64_t>("linear_key_head_dim", width);
  for (Value& value : linear_attention_values(s, {heads, heads, key_dim, 2 * key_dim}))
    out.push_back(std::move(value));
  out.push_back({"channel_mixer", "swiglu"});
  out.push_back(s.as<int64_t>("swiglu.d_ff", "intermediate_size"));
  out.push_back({"gated_delta_net.norm_eps", 1e-5});
  out.push_back(
      s.as<bool>("gated_delta_net.negative_eigenvalues", "linear_allow_neg_eigval", true));
  return out;
}

nlohmann::json config(const Expanded& m) {
  nlohmann::json out = decoder_config(m, kLayout);
  if (!m.has("gated_delta_net")) fail("model.pattern must name gated_delta_net");
  out.update(linear_attention_config(m));
  out.update({{"hidden_act", "silu"},
              {"intermediate_size", gated_width(m, "swiglu")},
              {"linear_allow_neg_eigval", m.get<bool>("gated_delta_net.negative_eigenvalues")}});
  return out;
}

void add_layer(std::vector<Rule>& out, const Expanded& m, const std::string& mixer,
               const std::string& ours, const std::string& theirs) {
  add_gated_mlp(out, ours, theirs);
  if (mixer == "attention") {
    // transformers 5.24 writes the norm after attention with this name
    for (Rule& rule : out)
      if (rule.ours == ours + "mixer_norm.weight")
        rule.theirs.front().older = theirs + "feedforward_layer_norm.weight";
    return;
  }
  add_gated_delta(out, m, ours + "mixer.", theirs + "linear_attn.");
  out.push_back({ours + "mixer.out_proj.weight", {{theirs + "linear_attn.o_proj.weight"}}});
  // transformers 5.24 writes thirds
  for (Rule& rule : out) rule.any_split |= rule.ours == ours + "mixer.conv.weight";
}

std::vector<Requirement> requirements() {
  auto out = decoder_requirements(kLayout);
  out.push_back({"gated_delta_net.negative_eigenvalues", {}});
  out.push_back({"gated_delta_net.norm_eps", {"1e-05"}});
  return out;
}

const bool registered = families().add(
    "olmo_hybrid",
    {.prefix = "model.",
     .left_out = {},
     .requires_ = requirements(),
     .values = values,
     .config = config,
     .rules = [](const Expanded& m) { return decoder_rules(m, kLayout, add_layer); }});

}  // namespace
}  // namespace assay::exchange
