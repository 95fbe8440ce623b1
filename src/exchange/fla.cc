// Models of flash-linear-attention: gla, delta_net, gated_deltanet (SwiGLU behind each) and rwkv7.
#include <cmath>

#include "exchange/family.h"

namespace assay::exchange {
namespace {

// ---- What gla, delta_net and gated_deltanet have in common. ----

int64_t hidden_width(const Settings& s) {
  if (s.has("intermediate_size")) return s.get<int64_t>("intermediate_size");
  return (s.get<int64_t>("hidden_size") * s.get<int64_t>("hidden_ratio", 4) * 2 / 3 + 255) / 256 *
         256;
}

std::string model_toml(const Settings& s, const char* mixer) {
  s.expect("attn", {});
  s.expect("hidden_act", {"swish", "silu"});
  s.expect("use_l2warp", {false});
  return fmt::format(
      "[model]\nvocab_size = {}\nd_model = {}\nnum_layers = {}\npattern = [\"{}\"]\n"
      "channel_mixer = \"swiglu\"\n"
      "norm = \"rmsnorm\"\nnorm_eps = {}\ntie_embeddings = {}\n[model.swiglu]\nd_ff = {}\n"
      "[model.{}]\nnorm_eps = {}\n",
      s.get<int64_t>("vocab_size"), s.get<int64_t>("hidden_size"),
      s.get<int64_t>("num_hidden_layers"), mixer, s.get<double>("norm_eps", 1e-6),
      s.get<bool>("tie_word_embeddings", false), hidden_width(s), mixer,
      s.get<double>("norm_eps", 1e-6));
}

nlohmann::json model_config(const Expanded& m, const std::string& mixer, const char* architecture) {
  if (m.get<double>(mixer + ".norm_eps") != m.get<double>("norm_eps"))
    fail("model.{}.norm_eps must be model.norm_eps", mixer);
  return {{"architectures", {architecture}},
          {"attn", nullptr},
          {"hidden_act", "swish"},
          {"hidden_size", m.get<int64_t>("d_model")},
          {"intermediate_size", gated_width(m, "swiglu")},
          {"norm_eps", m.get<double>("norm_eps")},
          {"num_heads", m.get<int64_t>(mixer + ".num_heads")},
          {"num_hidden_layers", m.get<int64_t>("num_layers")},
          {"tie_word_embeddings", m.get<bool>("tie_embeddings")}};
}

using LayerRules = void (*)(std::vector<Rule>& out, const Expanded& m, const std::string& ours,
                            const std::string& theirs);

std::vector<Rule> model_rules(const Expanded& m, LayerRules mixer_rules) {
  std::vector<Rule> out = {{"embedding", {{"model.embeddings.weight"}}},
                           {"norm.weight", {{"model.norm.weight"}}}};
  if (!m.get<bool>("tie_embeddings")) out.push_back({"head.weight", {{"lm_head.weight"}}});
  for (int64_t i = 0; i < m.get<int64_t>("num_layers"); ++i) {
    const std::string ours = fmt::format("layers_{}.", i),
                      theirs = fmt::format("model.layers.{}.", i);
    out.push_back({ours + "mixer_norm.weight", {{theirs + "attn_norm.weight"}}});
    out.push_back({ours + "channel_norm.weight", {{theirs + "mlp_norm.weight"}}});
    out.push_back({ours + "mixer.out_proj.weight", {{theirs + "attn.o_proj.weight"}}});
    mixer_rules(out, m, ours + "mixer.", theirs + "attn.");
    add_gated_mlp(out, ours, theirs);
  }
  return out;
}

std::vector<Requirement> requirements(const std::string& mixer) {
  return {{"pattern", {"[\"" + mixer + "\"]"}}, {"channel_mixer", {"\"swiglu\""}},
          {"swiglu.bias", {"false"}},           {"norm", {"\"rmsnorm\""}},
          {"embedding_norm", {"false"}},        {"positions", {"\"none\""}}};
}

struct Widths {
  int64_t keys, values;  // of all heads
};
Widths widths(const Expanded& m, const std::string& mixer) {
  const auto width = double(m.get<int64_t>("d_model"));
  return {std::llround(width * m.get<double>(mixer + ".expand_k")),
          std::llround(width * m.get<double>(mixer + ".expand_v"))};
}

Rule short_conv(const std::string& ours, const std::string& theirs, Widths w) {
  return {ours + "conv.weight",
          {{theirs + "q_conv1d.weight", w.keys, Layout::unsqueezed},
           {theirs + "k_conv1d.weight", w.keys, Layout::unsqueezed},
           {theirs + "v_conv1d.weight", w.values, Layout::unsqueezed}}};
}

// ---- gla ----

std::string gla_toml(const Settings& s) {
  s.expect("use_short_conv", {false});
  s.expect("use_output_gate", {true});
  s.expect("use_gk", {true});
  s.expect("use_gv", {false});
  s.expect("feature_map", {});
  s.expect("clamp_min", {});
  s.expect("elementwise_affine", {true});
  s.expect("fuse_norm", {true});
  const auto heads = s.get<int64_t>("num_heads", 4);
  s.expect("num_kv_heads", {heads});
  return model_toml(s, "gla") + fmt::format("num_heads = {}\nexpand_k = {}\nexpand_v = {}\n", heads,
                                            s.get<double>("expand_k", 0.5),
                                            s.get<double>("expand_v", 1));
}

nlohmann::json gla_config(const Expanded& m) {
  nlohmann::json config = model_config(m, "gla", "GLAForCausalLM");
  config.update({{"expand_k", m.get<double>("gla.expand_k")},
                 {"expand_v", m.get<double>("gla.expand_v")},
                 {"feature_map", nullptr},
                 {"num_kv_heads", nullptr},
                 {"use_output_gate", true},
                 {"use_short_conv", false}});
  return config;
}

void gla_rules(std::vector<Rule>& out, const Expanded& m, const std::string& ours,
               const std::string& theirs) {
  const Widths w = widths(m, "gla");
  out.push_back({ours + "qkvg_proj.weight",
                 {{theirs + "q_proj.weight", w.keys},
                  {theirs + "k_proj.weight", w.keys},
                  {theirs + "v_proj.weight", w.values},
                  {theirs + "g_proj.weight", w.values}}});
  out.push_back({ours + "gk.down_proj.weight", {{theirs + "gk_proj.0.weight"}}});
  for (const char* kind : {"weight", "bias"})
    out.push_back({ours + "gk.up_proj." + kind, {{theirs + "gk_proj.1." + kind}}});
  out.push_back({ours + "norm.weight", {{theirs + "g_norm_swish_gate.weight"}}});
}

std::vector<Requirement> gla_requirements() {
  auto out = requirements("gla");
  out.push_back({"gla.gate_rank", {"16"}});
  out.push_back({"gla.gate_normalizer", {"16.0"}});
  return out;
}

const bool gla =
    families().add("gla", {.prefix = "model.",
                           .left_out = {},
                           .requires_ = gla_requirements(),
                           .toml = gla_toml,
                           .config = gla_config,
                           .rules = [](const Expanded& m) { return model_rules(m, gla_rules); }});

// ---- delta_net ----

std::string delta_toml(const Settings& s) {
  s.expect("use_gate", {false});
  s.expect("use_short_conv", {true});
  s.expect("use_beta", {true});
  s.expect("use_output_norm", {true});
  s.expect("allow_neg_eigval", {false});
  s.expect("qk_norm", {"l2"});
  s.expect("qk_activation", {"silu"});
  return model_toml(s, "delta_net") +
         fmt::format("num_heads = {}\nexpand_k = {}\nexpand_v = {}\nconv_width = {}\n",
                     s.get<int64_t>("num_heads", 16), s.get<double>("expand_k", 1),
                     s.get<double>("expand_v", 1), s.get<int64_t>("conv_size", 4));
}

nlohmann::json delta_config(const Expanded& m) {
  nlohmann::json config = model_config(m, "delta_net", "DeltaNetForCausalLM");
  if (m.get<int64_t>("delta_net.conv_width") == 0)
    fail("model.delta_net.conv_width must be positive");
  config.update({{"conv_size", m.get<int64_t>("delta_net.conv_width")},
                 {"expand_k", m.get<double>("delta_net.expand_k")},
                 {"expand_v", m.get<double>("delta_net.expand_v")},
                 {"qk_activation", "silu"},
                 {"qk_norm", "l2"},
                 {"use_beta", true},
                 {"use_gate", false},
                 {"use_output_norm", true},
                 {"use_short_conv", true}});
  return config;
}

void delta_rules(std::vector<Rule>& out, const Expanded& m, const std::string& ours,
                 const std::string& theirs) {
  const Widths w = widths(m, "delta_net");
  out.push_back({ours + "qkv.weight",
                 {{theirs + "q_proj.weight", w.keys},
                  {theirs + "k_proj.weight", w.keys},
                  {theirs + "v_proj.weight", w.values}}});
  out.push_back(short_conv(ours, theirs, w));
  out.push_back({ours + "beta_proj.weight", {{theirs + "b_proj.weight"}}});
  out.push_back({ours + "norm.weight", {{theirs + "o_norm.weight"}}});
}

const bool delta_net = families().add(
    "delta_net", {.prefix = "model.",
                  .left_out = {},
                  .requires_ = requirements("delta_net"),
                  .toml = delta_toml,
                  .config = delta_config,
                  .rules = [](const Expanded& m) { return model_rules(m, delta_rules); }});

// ---- gated_deltanet ----

std::string gated_delta_toml(const Settings& s) {
  s.expect("use_gate", {true});
  s.expect("use_short_conv", {true});
  s.expect("allow_neg_eigval", {false});
  const auto head_dim = s.get<int64_t>("head_dim", 256), key_heads = s.get<int64_t>("num_heads", 6);
  return model_toml(s, "gated_delta_net") +
         fmt::format(
             "num_heads = {}\nnum_key_heads = {}\nhead_dim = {}\nvalue_head_dim = {}\n"
             "conv_width = {}\n",
             s.get<int64_t>("num_v_heads", key_heads), key_heads, head_dim,
             std::llround(double(head_dim) * s.get<double>("expand_v", 2)),
             s.get<int64_t>("conv_size", 4));
}

nlohmann::json gated_delta_config(const Expanded& m) {
  nlohmann::json config = model_config(m, "gated_delta_net", "GatedDeltaNetForCausalLM");
  const DeltaShape shape = delta_shape(m);
  if (m.get<int64_t>("gated_delta_net.conv_width") == 0)
    fail("model.gated_delta_net.conv_width must be positive");
  config.update({{"conv_size", m.get<int64_t>("gated_delta_net.conv_width")},
                 {"expand_v", double(shape.value_dim) / double(shape.key_dim)},
                 {"head_dim", shape.key_dim},
                 {"num_heads", shape.key_heads},
                 {"num_v_heads", shape.heads},
                 {"use_gate", true},
                 {"use_short_conv", true}});
  return config;
}

void gated_delta_rules(std::vector<Rule>& out, const Expanded& m, const std::string& ours,
                       const std::string& theirs) {
  const DeltaShape s = delta_shape(m);
  const Widths w{s.key_heads * s.key_dim, s.heads * s.value_dim};
  out.push_back({ours + "qkvz_proj.weight",
                 {{theirs + "q_proj.weight", w.keys},
                  {theirs + "k_proj.weight", w.keys},
                  {theirs + "v_proj.weight", w.values},
                  {theirs + "g_proj.weight", w.values}}});
  out.push_back(
      {ours + "ba_proj.weight", {{theirs + "b_proj.weight"}, {theirs + "a_proj.weight"}}});
  out.push_back(short_conv(ours, theirs, w));
  for (const char* same : {"A_log", "dt_bias"}) out.push_back({ours + same, {{theirs + same}}});
  out.push_back({ours + "norm.weight", {{theirs + "o_norm.weight"}}});
}

const bool gated_deltanet =
    families().add("gated_deltanet",
                   {.prefix = "model.",
                    .left_out = {},
                    .requires_ = requirements("gated_delta_net"),
                    .toml = gated_delta_toml,
                    .config = gated_delta_config,
                    .rules = [](const Expanded& m) { return model_rules(m, gated_delta_rules); }});

}  // namespace
}  // namespace assay::exchange
