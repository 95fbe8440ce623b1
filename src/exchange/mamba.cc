// Mamba-1 and Mamba-2 blocks without feed-forward layers.
#include "exchange/family.h"

namespace assay::exchange {
namespace {

// Checkpoints of mamba_ssm, which transformers renames, too.
const std::map<std::string, std::string> kOlderNames = {
    {"backbone.embedding.weight", "backbone.embeddings.weight"}};

// `same`: tensors of a mixer that have one name here and there.
std::vector<Rule> model_rules(const Expanded& m, std::vector<std::string> same) {
  std::vector<Rule> out = {{"embedding", {{"backbone.embeddings.weight"}}},
                           {"norm.weight", {{"backbone.norm_f.weight"}}}};
  if (!m.get<bool>("tie_embeddings")) out.push_back({"head.weight", {{"lm_head.weight"}}});
  for (const char* both : {"A_log", "D", "in_proj.weight", "out_proj.weight"}) same.push_back(both);
  for (int64_t i = 0; i < m.get<int64_t>("num_layers"); ++i) {
    const std::string ours = fmt::format("layers_{}.", i);
    const std::string theirs = fmt::format("backbone.layers.{}.", i);
    out.push_back({ours + "mixer_norm.weight", {{theirs + "norm.weight"}}});
    for (const std::string& name : same)
      out.push_back({ours + "mixer." + name, {{theirs + "mixer." + name}}});
    out.push_back(
        {ours + "mixer.conv.weight", {{theirs + "mixer.conv1d.weight", 1, Layout::unsqueezed}}});
    out.push_back({ours + "mixer.conv.bias", {{theirs + "mixer.conv1d.bias"}}});
  }
  return out;
}

std::vector<Requirement> requirements(const std::string& mixer,
                                      const std::vector<Requirement>& more) {
  std::vector<Requirement> out = {{"pattern", {"[\"" + mixer + "\"]"}},
                                  {"channel_mixer", {"\"none\""}},
                                  {"norm", {"\"rmsnorm\""}},
                                  {mixer + ".decay", {"\"full\""}}};
  out.insert(out.end(), more.begin(), more.end());
  return out;
}

// ---- mamba ----

std::vector<Value> mamba_values(const Settings& s) {
  s.expect("hidden_act", {"silu", "swish"});
  s.expect("use_bias", {false});
  s.expect("use_conv_bias", {true});
  const auto width = s.get<int64_t>("hidden_size");
  const auto expand = s.get<int64_t>("expand", 2);
  s.expect("intermediate_size", {width * expand});
  s.expect("d_inner", {width * expand});
  const bool automatic = s.get<nlohmann::json>("time_step_rank", "auto") == "auto";
  const int64_t rank = automatic ? 0 : s.get<int64_t>("time_step_rank");
  return {s.as<int64_t>("vocab_size", "vocab_size"),
          s.as<int64_t>("d_model", "hidden_size"),
          s.as<int64_t>("num_layers", "num_hidden_layers"),
          {"pattern", Names{"mamba1"}},
          {"channel_mixer", "none"},
          {"norm", "rmsnorm"},
          s.as<double>("norm_eps", "layer_norm_epsilon", 1e-5),
          s.as<bool>("tie_embeddings", "tie_word_embeddings", true),
          s.as<int64_t>("mamba1.state_size", "state_size", 16),
          s.as<int64_t>("mamba1.expand", "expand", 2),
          s.as<int64_t>("mamba1.conv_width", "conv_kernel", 4),
          {"mamba1.dt_rank", rank, s.place("time_step_rank")}};
}

nlohmann::json mamba_config(const Expanded& m) {
  if (m.get<int64_t>("mamba1.conv_width") == 0) fail("model.mamba1.conv_width must be positive");
  const auto width = m.get<int64_t>("d_model");
  const auto expand = m.get<int64_t>("mamba1.expand");
  const auto rank = m.get<int64_t>("mamba1.dt_rank");
  return {{"architectures", {"MambaForCausalLM"}},
          {"conv_kernel", m.get<int64_t>("mamba1.conv_width")},
          {"expand", expand},
          {"hidden_act", "silu"},
          {"hidden_size", width},
          {"intermediate_size", expand * width},
          {"layer_norm_epsilon", m.get<double>("norm_eps")},
          {"num_hidden_layers", m.get<int64_t>("num_layers")},
          {"residual_in_fp32", true},
          {"state_size", m.get<int64_t>("mamba1.state_size")},
          {"tie_word_embeddings", m.get<bool>("tie_embeddings")},
          {"time_step_rank", rank > 0 ? rank : (width + 15) / 16},
          {"use_bias", false},
          {"use_conv_bias", true}};
}

std::vector<Rule> mamba_rules(const Expanded& m) {
  auto out = model_rules(m, {"x_proj.weight", "dt_proj.weight"});
  for (int64_t i = 0; i < m.get<int64_t>("num_layers"); ++i)
    out.push_back({fmt::format("layers_{}.mixer.dt_bias", i),
                   {{fmt::format("backbone.layers.{}.mixer.dt_proj.bias", i)}}});
  return out;
}

const bool mamba = families().add("mamba", {.prefix = "backbone.",
                                            .left_out = {},
                                            .requires_ = requirements("mamba1", {}),
                                            .values = mamba_values,
                                            .config = mamba_config,
                                            .rules = mamba_rules,
                                            .renamed = kOlderNames});

// ---- mamba2 ----

// As transformers writes [0, ∞]
const nlohmann::json kNoLimit = {0.0, {{"__float__", "Infinity"}}};

std::vector<Value> mamba2_values(const Settings& s) {
  s.expect("hidden_act", {"silu", "swish"});
  s.expect("use_bias", {false});
  s.expect("use_conv_bias", {true});
  s.expect("rms_norm", {true});
  s.expect("time_step_limit", {kNoLimit});
  const auto width = s.get<int64_t>("hidden_size");
  const auto expand = s.get<int64_t>("expand", 2);
  const auto head_dim = s.get<int64_t>("head_dim", 64);
  s.expect("num_heads", {expand * width / std::max<int64_t>(head_dim, 1)});
  return {s.as<int64_t>("vocab_size", "vocab_size"),
          s.as<int64_t>("d_model", "hidden_size"),
          s.as<int64_t>("num_layers", "num_hidden_layers"),
          {"pattern", Names{"mamba2"}},
          {"channel_mixer", "none"},
          {"norm", "rmsnorm"},
          s.as<double>("norm_eps", "layer_norm_epsilon", 1e-5),
          s.as<bool>("tie_embeddings", "tie_word_embeddings", false),
          s.as<int64_t>("mamba2.state_size", "state_size", 128),
          s.as<int64_t>("mamba2.expand", "expand", 2),
          s.as<int64_t>("mamba2.head_dim", "head_dim", 64),
          s.as<int64_t>("mamba2.num_groups", "n_groups", 8),
          s.as<int64_t>("mamba2.conv_width", "conv_kernel", 4),
          s.as<double>("mamba2.norm_eps", "layer_norm_epsilon", 1e-5)};
}

nlohmann::json mamba2_config(const Expanded& m) {
  const auto width = m.get<int64_t>("d_model");
  const auto expand = m.get<int64_t>("mamba2.expand");
  const auto head_dim = m.get<int64_t>("mamba2.head_dim");
  if (m.get<int64_t>("mamba2.conv_width") == 0) fail("model.mamba2.conv_width must be positive");
  if (m.get<double>("mamba2.norm_eps") != m.get<double>("norm_eps"))
    fail("model.mamba2.norm_eps must be model.norm_eps");
  return {{"architectures", {"Mamba2ForCausalLM"}},
          {"conv_kernel", m.get<int64_t>("mamba2.conv_width")},
          {"expand", expand},
          {"head_dim", head_dim},
          {"hidden_act", "silu"},
          {"hidden_size", width},
          {"layer_norm_epsilon", m.get<double>("norm_eps")},
          {"n_groups", m.get<int64_t>("mamba2.num_groups")},
          {"num_heads", expand * width / std::max<int64_t>(head_dim, 1)},
          {"num_hidden_layers", m.get<int64_t>("num_layers")},
          {"residual_in_fp32", true},
          {"state_size", m.get<int64_t>("mamba2.state_size")},
          {"tie_word_embeddings", m.get<bool>("tie_embeddings")},
          {"use_bias", false},
          {"use_conv_bias", true}};
}

const bool mamba2 = families().add(
    "mamba2",
    {.prefix = "backbone.",
     .left_out = {},
     .requires_ = requirements("mamba2", {{"mamba2.norm", {"true"}}}),
     .values = mamba2_values,
     .config = mamba2_config,
     .rules = [](const Expanded& m) { return model_rules(m, {"dt_bias", "norm.weight"}); },
     .renamed = kOlderNames});

}  // namespace
}  // namespace assay::exchange
