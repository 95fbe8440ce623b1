// Mamba-1 blocks without feed-forward layers.
#include "nn/hugging_face/family.h"

namespace assay::nn::hugging_face {
namespace {

std::string toml(const Settings& s) {
  s.expect("hidden_act", {"silu", "swish"});
  s.expect("use_bias", {false});
  s.expect("use_conv_bias", {true});
  const auto width = s.get<int64_t>("hidden_size"), expand = s.get<int64_t>("expand", 2);
  s.expect("intermediate_size", {width * expand});
  s.expect("d_inner", {width * expand});
  const bool automatic = s.get<nlohmann::json>("time_step_rank", "auto") == "auto";
  return fmt::format(
      "[model]\nvocab_size = {}\nd_model = {}\nnum_layers = {}\npattern = [\"mamba1\"]\nchannel_mixer = \"none\"\n"
      "norm = \"rmsnorm\"\nnorm_eps = {}\ntie_embeddings = {}\n"
      "[model.mamba1]\nstate_size = {}\nexpand = {}\nconv_width = {}\ndt_rank = {}\n",
      s.get<int64_t>("vocab_size"), width, s.get<int64_t>("num_hidden_layers"),
      s.get<double>("layer_norm_epsilon", 1e-5), s.get<bool>("tie_word_embeddings", true),
      s.get<int64_t>("state_size", 16), expand, s.get<int64_t>("conv_kernel", 4),
      automatic ? 0 : s.get<int64_t>("time_step_rank"));
}

nlohmann::json config(const Expanded& m) {
  const auto width = m.get<int64_t>("d_model"), expand = m.get<int64_t>("mamba1.expand"),
             rank = m.get<int64_t>("mamba1.dt_rank");
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

std::vector<Rule> rules(const Expanded& m) {
  std::vector<Rule> out = {{"embedding", {{"backbone.embeddings.weight"}}},
                           {"norm.weight", {{"backbone.norm_f.weight"}}}};
  if (!m.get<bool>("tie_embeddings")) out.push_back({"head.weight", {{"lm_head.weight"}}});
  for (int64_t i = 0; i < m.get<int64_t>("num_layers"); ++i) {
    const std::string ours = fmt::format("layers_{}.", i), theirs = fmt::format("backbone.layers.{}.", i);
    out.push_back({ours + "mixer_norm.weight", {{theirs + "norm.weight"}}});
    for (const char* same : {"A_log", "D", "in_proj.weight", "x_proj.weight", "dt_proj.weight", "out_proj.weight"})
      out.push_back({ours + "mixer." + same, {{theirs + "mixer." + same}}});
    out.push_back({ours + "mixer.conv.weight", {{theirs + "mixer.conv1d.weight", 1, Layout::unsqueezed}}});
    out.push_back({ours + "mixer.conv.bias", {{theirs + "mixer.conv1d.bias"}}});
    out.push_back({ours + "mixer.dt_bias", {{theirs + "mixer.dt_proj.bias"}}});
  }
  return out;
}

const bool registered = families().add("mamba", {.prefix = "backbone.",
                                                 .left_out = {},
                                                 .requires_ = {{"pattern", {"[\"mamba1\"]"}},
                                                               {"channel_mixer", {"\"none\""}},
                                                               {"norm", {"\"rmsnorm\""}},
                                                               {"positions", {"\"none\""}}},
                                                 .toml = toml,
                                                 .config = config,
                                                 .rules = rules});

}  // namespace
}  // namespace assay::nn::hugging_face
