// Models of flash-linear-attention: gla, delta_net, gated_deltanet (SwiGLU behind each) and rwkv7.
#include <cmath>

#include "exchange/family.h"

namespace assay::exchange {
namespace {

// ---- What gla, delta_net and gated_deltanet have in common. ----

Value hidden_width(const Settings& s) {
  const std::string ours = "swiglu.d_ff";
  if (s.has("intermediate_size")) return s.as<int64_t>(ours, "intermediate_size");
  const int64_t wide = s.get<int64_t>("hidden_size") * s.get<int64_t>("hidden_ratio", 4) * 2 / 3;
  return {ours, (wide + 255) / 256 * 256, s.place("hidden_ratio")};
}

std::vector<Value> model_values(const Settings& s, const std::string& mixer,
                                const std::vector<Value>& of_mixer) {
  s.expect("attn", {});
  s.expect("hidden_act", {"swish", "silu"});
  s.expect("use_l2warp", {false});
  std::vector<Value> out = {s.as<int64_t>("vocab_size", "vocab_size"),
                            s.as<int64_t>("d_model", "hidden_size"),
                            s.as<int64_t>("num_layers", "num_hidden_layers"),
                            {"pattern", Names{mixer}},
                            {"channel_mixer", "swiglu"},
                            {"norm", "rmsnorm"},
                            s.as<double>("norm_eps", "norm_eps", 1e-6),
                            s.as<bool>("tie_embeddings", "tie_word_embeddings", false),
                            hidden_width(s),
                            s.as<double>(mixer + ".norm_eps", "norm_eps", 1e-6)};
  out.insert(out.end(), of_mixer.begin(), of_mixer.end());
  return out;
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
    const std::string ours = fmt::format("layers_{}.", i);
    const std::string theirs = fmt::format("model.layers.{}.", i);
    out.push_back({ours + "mixer_norm.weight", {{theirs + "attn_norm.weight"}}});
    out.push_back({ours + "channel_norm.weight", {{theirs + "mlp_norm.weight"}}});
    out.push_back({ours + "mixer.out_proj.weight", {{theirs + "attn.o_proj.weight"}}});
    mixer_rules(out, m, ours + "mixer.", theirs + "attn.");
    add_gated_mlp(out, ours, theirs);
  }
  return out;
}

std::vector<Requirement> requirements(const std::string& mixer) {
  return {{"pattern", {"[\"" + mixer + "\"]"}},
          {"channel_mixer", {"\"swiglu\""}},
          {"norm", {"\"rmsnorm\""}}};
}

struct Widths {
  // of all heads
  int64_t keys;
  int64_t values;
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

std::vector<Value> gla_values(const Settings& s) {
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
  return model_values(
      s, "gla",
      {s.as<int64_t>("gla.num_heads", "num_heads", 4),
       s.as<double>("gla.expand_k", "expand_k", 0.5), s.as<double>("gla.expand_v", "expand_v", 1)});
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
                           .values = gla_values,
                           .config = gla_config,
                           .rules = [](const Expanded& m) { return model_rules(m, gla_rules); },
                           .library = "fla"});

// ---- delta_net ----

std::vector<Value> delta_values(const Settings& s) {
  s.expect("use_gate", {false});
  s.expect("use_short_conv", {true});
  s.expect("use_beta", {true});
  s.expect("use_output_norm", {true});
  s.expect("allow_neg_eigval", {false});
  s.expect("qk_norm", {"l2"});
  s.expect("qk_activation", {"silu"});
  return model_values(s, "delta_net",
                      {s.as<int64_t>("delta_net.num_heads", "num_heads", 16),
                       s.as<double>("delta_net.expand_k", "expand_k", 1),
                       s.as<double>("delta_net.expand_v", "expand_v", 1),
                       s.as<int64_t>("delta_net.conv_width", "conv_size", 4)});
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
                  .values = delta_values,
                  .config = delta_config,
                  .rules = [](const Expanded& m) { return model_rules(m, delta_rules); },
                  .library = "fla"});

// ---- gated_deltanet ----

std::vector<Value> gated_delta_values(const Settings& s) {
  s.expect("use_gate", {true});
  s.expect("use_short_conv", {true});
  s.expect("allow_neg_eigval", {false});
  const auto head_dim = s.get<int64_t>("head_dim", 256);
  const auto key_heads = s.get<int64_t>("num_heads", 6);
  return model_values(s, "gated_delta_net",
                      {s.as<int64_t>("gated_delta_net.num_heads", "num_v_heads", key_heads),
                       s.as<int64_t>("gated_delta_net.num_key_heads", "num_heads", 6),
                       s.as<int64_t>("gated_delta_net.head_dim", "head_dim", 256),
                       {"gated_delta_net.value_head_dim",
                        int64_t(std::llround(double(head_dim) * s.get<double>("expand_v", 2))),
                        s.place("expand_v")},
                       s.as<int64_t>("gated_delta_net.conv_width", "conv_size", 4)});
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

const bool gated_deltanet = families().add(
    "gated_deltanet", {.prefix = "model.",
                       .left_out = {},
                       .requires_ = requirements("gated_delta_net"),
                       .values = gated_delta_values,
                       .config = gated_delta_config,
                       .rules = [](const Expanded& m) { return model_rules(m, add_gated_delta); },
                       .library = "fla"});

}  // namespace

void add_gated_delta(std::vector<Rule>& out, const Expanded& m, const std::string& ours,
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

}  // namespace assay::exchange
