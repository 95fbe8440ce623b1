// Granite 4 without experts: Mamba-2 and attention, and scales of the embedding, the residual
// branches, the scores of attention and the logits.
#include <cmath>

#include "exchange/decoder.h"

namespace assay::exchange {
namespace {

// The first names are those of published files.
const DecoderLayout kLayout = {
    .architecture = "GraniteMoeHybridForCausalLM",
    .kinds = {{"attention", "attention"},
              {"mamba", "mamba2"},
              {"full_attention", "attention"},
              {"linear_attention", "mamba2"}},
    .optional_positions = true,
    .scaled = true,
};

const nlohmann::json kNoLimit = {0.0, {{"__float__", "Infinity"}}};

void add_mamba_values(std::vector<Value>& out, const Settings& s) {
  s.expect("mamba_conv_bias", {true});
  s.expect("mamba_proj_bias", {false});
  s.expect("time_step_limit", {kNoLimit});
  const auto heads = s.get<int64_t>("mamba_n_heads", 128);
  const int64_t inner = s.get<int64_t>("mamba_expand", 2) * s.get<int64_t>("hidden_size");
  if (heads < 1 || inner % heads)
    fail("{} is {}, expected a divisor of {}. Nothing was written.", s.place("mamba_n_heads"),
         heads, inner);
  s.expect("mamba_d_head", {"auto", inner / heads});
  out.push_back({"mamba2.head_dim", inner / heads, s.place("mamba_n_heads")});
  out.push_back(s.as<int64_t>("mamba2.expand", "mamba_expand", 2));
  out.push_back(s.as<int64_t>("mamba2.state_size", "mamba_d_state", 256));
  out.push_back(s.as<int64_t>("mamba2.num_groups", "mamba_n_groups", 1));
  out.push_back(s.as<int64_t>("mamba2.conv_width", "mamba_d_conv", 4));
  out.push_back(s.as<double>("mamba2.norm_eps", "rms_norm_eps", 1e-6));
}

std::vector<Value> values(const Settings& s) {
  s.expect("hidden_act", {"silu"});
  s.expect("num_local_experts", {0});
  if (!s.has("num_local_experts"))
    fail(
        "{} is missing, which means 8 experts, and experts are not supported. Nothing was written.",
        s.place("num_local_experts"));
  s.expect("position_embedding_type", {"rope", "nope"});
  const Names mamba(each_nth(s, "", 1, kLayout).size(), "mamba");
  const Names pattern = pattern_of(s, kLayout, mamba);
  std::vector<Value> out = decoder_values(s, kLayout, pattern);
  out.push_back({"channel_mixer", "swiglu"});
  out.push_back(s.as<int64_t>("swiglu.d_ff", "shared_intermediate_size", 1024));
  out.push_back(s.as<double>("embedding_scale", "embedding_multiplier", 1));
  out.push_back(s.as<double>("residual_scale", "residual_multiplier", 1));
  out.push_back(s.as<double>("logit_divisor", "logits_scaling", 1));
  if (has_mixer(pattern, "attention")) {
    out.push_back(s.as<double>("attention.softmax_scale", "attention_multiplier", 1));
    const bool rope = s.get<std::string>("position_embedding_type", "nope") == "rope";
    out.push_back(
        {"attention.position", rope ? "rope" : "none", s.place("position_embedding_type")});
  }
  if (has_mixer(pattern, "mamba2")) add_mamba_values(out, s);
  return out;
}

nlohmann::json config(const Expanded& m) {
  nlohmann::json out = decoder_config(m, kLayout);
  out.update({{"embedding_multiplier", m.get<double>("embedding_scale")},
              {"hidden_act", "silu"},
              {"intermediate_size", gated_width(m, "swiglu")},
              {"logits_scaling", m.get<double>("logit_divisor")},
              {"num_experts_per_tok", 0},
              {"num_local_experts", 0},
              {"residual_multiplier", m.get<double>("residual_scale")},
              {"shared_intermediate_size", gated_width(m, "swiglu")}});
  if (m.has("attention")) {
    const auto scale = m.get<double>("attention.softmax_scale");
    out["attention_multiplier"] =
        scale > 0 ? scale : 1 / std::sqrt(double(attention_shape(m).head_dim));
    const bool rope = m.get<std::string>("attention.position") == "rope";
    out["position_embedding_type"] = rope ? "rope" : "nope";
    out["rope_parameters"] = {{"rope_theta", m.get<double>("attention.rope_base")},
                              {"rope_type", "default"}};
    if (attention_shape(m).heads * attention_shape(m).head_dim != m.get<int64_t>("d_model"))
      fail("model.attention.head_dim must be d_model / num_heads");
  }
  if (!m.has("mamba2")) return out;
  const auto expand = m.get<int64_t>("mamba2.expand");
  const auto head_dim = m.get<int64_t>("mamba2.head_dim");
  const int64_t inner = expand * m.get<int64_t>("d_model");
  if (m.get<int64_t>("mamba2.conv_width") == 0) fail("model.mamba2.conv_width must be positive");
  if (m.get<double>("mamba2.norm_eps") != m.get<double>("norm_eps"))
    fail("model.mamba2.norm_eps must be model.norm_eps");
  out.update({{"mamba_conv_bias", true},
              {"mamba_d_conv", m.get<int64_t>("mamba2.conv_width")},
              {"mamba_d_head", head_dim},
              {"mamba_d_state", m.get<int64_t>("mamba2.state_size")},
              {"mamba_expand", expand},
              {"mamba_n_groups", m.get<int64_t>("mamba2.num_groups")},
              {"mamba_n_heads", inner / std::max<int64_t>(head_dim, 1)},
              {"mamba_proj_bias", false}});
  return out;
}

void add_layer(std::vector<Rule>& out, const Expanded&, const std::string& mixer,
               const std::string& ours, const std::string& theirs) {
  const std::string f = theirs + "shared_mlp.";
  const std::string a = theirs + "mamba.";
  out.push_back({ours + "channel_mixer.in_proj.weight", {{f + "input_linear.weight"}}});
  out.push_back({ours + "channel_mixer.out_proj.weight", {{f + "output_linear.weight"}}});
  if (mixer != "mamba2") return;
  for (const char* same :
       {"A_log", "D", "dt_bias", "in_proj.weight", "norm.weight", "out_proj.weight"})
    out.push_back({ours + "mixer." + same, {{a + same}}});
  out.push_back({ours + "mixer.conv.weight", {{a + "conv1d.weight", 1, Layout::unsqueezed}}});
  out.push_back({ours + "mixer.conv.bias", {{a + "conv1d.bias"}}});
}

std::vector<Requirement> requirements() {
  auto out = decoder_requirements(kLayout);
  out.push_back({"mamba2.decay", {"\"full\""}});
  out.push_back({"mamba2.norm", {"true"}});
  return out;
}

const bool registered =
    families().add("granitemoehybrid",
                   {.prefix = "model.",
                    .left_out = {},
                    .requires_ = requirements(),
                    .values = values,
                    .config = config,
                    .rules = [](const Expanded& m) { return decoder_rules(m, kLayout, add_layer); },
                    .on_request = true});

}  // namespace
}  // namespace assay::exchange
