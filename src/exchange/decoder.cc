#include "exchange/decoder.h"

#include <cmath>

namespace assay::exchange {

// ---- Kinds of layers ----

namespace {

int64_t layers_of(const Settings& s) {
  constexpr int64_t kMost = 10'000;  // as ModelSpec has it
  const auto layers = s.get<int64_t>("num_hidden_layers");
  if (layers < 1 || layers > kMost)
    fail("{} is {}, expected a number from 1 to {}. Nothing was written.",
         s.place("num_hidden_layers"), layers, kMost);
  return layers;
}

Names shortest_period(const Names& layers) {
  size_t period = 1;
  const auto repeats = [&] {
    for (size_t i = period; i < layers.size(); ++i)
      if (layers[i] != layers[i - period]) return false;
    return true;
  };
  while (period < layers.size() && !repeats()) ++period;
  return {layers.begin(), layers.begin() + std::ptrdiff_t(period)};
}

}  // namespace

Names pattern_of(const Settings& s, const DecoderLayout& layout, const Names& absent) {
  const auto theirs = s.get<nlohmann::json>("layer_types", absent);
  const int64_t layers = layers_of(s);
  if (!theirs.is_array() || int64_t(theirs.size()) != layers)
    fail("{} is {}, expected a list of {} kinds of layers. Nothing was written.",
         s.place("layer_types"), theirs.dump(), layers);
  Names mixers;
  for (const nlohmann::json& layer : theirs) {
    const auto kind =
        std::ranges::find_if(layout.kinds, [&](const LayerKind& k) { return layer == k.theirs; });
    if (kind == layout.kinds.end()) {
      Names known;
      for (const LayerKind& k : layout.kinds) known.push_back(k.theirs);
      fail("{}: layers of the kind {} are not supported; expected {}. Nothing was written.",
           s.place("layer_types"), layer.dump(), join(known, " or "));
    }
    mixers.push_back(kind->mixer);
  }
  return shortest_period(mixers);
}

Names each_nth(const Settings& s, const std::string& key, int64_t absent,
               const DecoderLayout& layout) {
  const auto n = s.get<int64_t>(key, absent);
  if (n < 1) fail("{} is {}, expected a positive number. Nothing was written.", s.place(key), n);
  Names theirs;
  for (int64_t i = 1; i <= layers_of(s); ++i)
    theirs.push_back(layout.kinds[i % n == 0 ? 0 : 1].theirs);
  return theirs;
}

Names mixers_of(const Expanded& m) {
  const auto pattern = m.get<Names>("pattern");
  Names mixers;
  for (int64_t i = 0; i < m.get<int64_t>("num_layers"); ++i)
    mixers.push_back(pattern[size_t(i) % pattern.size()]);
  return mixers;
}

bool has_mixer(const Names& pattern, const std::string& mixer) {
  return std::ranges::find(pattern, mixer) != pattern.end();
}

// ---- Settings ----

namespace {

// transformers 5 has rope_parameters; before, rope_theta was at the top, next to rope_scaling.
std::vector<Value> rope_values(const Settings& s, const DecoderLayout& layout) {
  const Settings rope = s.child("rope_parameters");
  const Settings scaling = s.child("rope_scaling");
  for (const Settings& settings : {rope, scaling})
    for (const char* kind : {"rope_type", "type"}) settings.expect(kind, {"default"});
  // mrope: all coordinates of a position in a text are equal
  rope.expect_only({"rope_theta", "rope_type", "type", "partial_rotary_factor", "mrope_interleaved",
                    "mrope_section"});
  if (layout.optional_positions && rope.is_null("rope_theta"))
    return {{"attention.position", "none", rope.place("rope_theta")}};
  scaling.expect_only({"rope_type", "type"});
  const auto value = [&](const std::string& ours, const std::string& theirs, double absent) {
    return rope.has(theirs) ? rope.as<double>(ours, theirs) : s.as<double>(ours, theirs, absent);
  };
  const Value base = value("attention.rope_base", "rope_theta", layout.absent_rope_base);
  if (layout.absent_rotary_fraction == 1) {
    for (const Settings& settings : {s, rope}) settings.expect("partial_rotary_factor", {1.0});
    return {base};
  }
  return {base, value("attention.rotary_fraction", "partial_rotary_factor",
                      layout.absent_rotary_fraction)};
}

void add_attention_values(std::vector<Value>& out, const Settings& s, const DecoderLayout& layout) {
  const auto heads = s.get<int64_t>("num_attention_heads");
  const int64_t width = heads > 0 ? s.get<int64_t>("hidden_size") / heads : 0;
  const int64_t head_dim = layout.absent_head_dim ? layout.absent_head_dim : width;
  out.push_back(s.as<int64_t>("attention.num_heads", "num_attention_heads"));
  out.push_back(s.as<int64_t>("attention.num_kv_heads", "num_key_value_heads", heads));
  out.push_back(s.as<int64_t>("attention.head_dim", "head_dim", head_dim));
  if (layout.qkv_bias) out.push_back({"attention.qkv_bias", true});
  else out.push_back(s.as<bool>("attention.bias", "attention_bias", false));
  out.push_back({"attention.gate", layout.gate});
  out.push_back({"attention.qk_rmsnorm", layout.qk_rmsnorm});
  if (layout.qk_rmsnorm != "none")
    out.push_back(s.as<double>("attention.norm_eps", layout.eps, layout.absent_eps));
  for (Value& value : rope_values(s, layout)) out.push_back(std::move(value));
}

nlohmann::json attention_config(const Expanded& m, const DecoderLayout& layout) {
  const AttentionShape shape = attention_shape(m);
  if (layout.qk_rmsnorm != "none" &&
      m.get<double>("attention.norm_eps") != m.get<double>("norm_eps"))
    fail("model.attention.norm_eps must be model.norm_eps");
  const auto base = m.get<double>("attention.rope_base");
  nlohmann::json rope = {{"rope_theta", base}, {"rope_type", "default"}};
  if (m.get<std::string>("attention.position") == "none") rope["rope_theta"] = nullptr;
  if (layout.absent_rotary_fraction != 1)
    rope["partial_rotary_factor"] = m.get<double>("attention.rotary_fraction");
  nlohmann::json out = {{"attention_dropout", 0.0},
                        {"head_dim", shape.head_dim},
                        {"num_attention_heads", shape.heads},
                        {"num_key_value_heads", shape.kv_heads},
                        {"rope_parameters", rope}};
  if (!layout.optional_positions) out["rope_theta"] = base;
  if (!layout.qkv_bias) out["attention_bias"] = m.get<bool>("attention.bias");
  return out;
}

}  // namespace

std::vector<Value> decoder_values(const Settings& s, const DecoderLayout& layout,
                                  const Names& pattern) {
  std::vector<Value> out = {s.as<int64_t>("vocab_size", "vocab_size"),
                            s.as<int64_t>("d_model", "hidden_size"),
                            s.as<int64_t>("num_layers", "num_hidden_layers"),
                            {"pattern", pattern},
                            {"norm", layout.norm},
                            s.as<double>("norm_eps", layout.eps, layout.absent_eps),
                            s.as<bool>("tie_embeddings", "tie_word_embeddings", layout.absent_tie)};
  if (layout.post_norm) out.push_back({"post_norm", Names{"attention"}});
  if (has_mixer(pattern, "attention")) add_attention_values(out, s, layout);
  return out;
}

std::vector<Requirement> decoder_requirements(const DecoderLayout& layout) {
  const auto quoted = [](const std::string& value) { return '"' + value + '"'; };
  const auto only = [](bool value) { return value ? "true" : "false"; };
  std::vector<Requirement> out = {
      {"channel_mixer", layout.channel_mixers},
      {"norm", {quoted(layout.norm)}},
      {"attention.gate", {quoted(layout.gate)}},
      {"attention.qkv_bias", {only(layout.qkv_bias)}},
      {"attention.qk_rmsnorm", {quoted(layout.qk_rmsnorm)}},
  };
  if (layout.qkv_bias) out.push_back({"attention.bias", {"false"}});
  if (layout.windows) out.push_back({"attention.window", {}});
  if (layout.optional_positions)
    out.push_back({"attention.position", {quoted("rope"), quoted("none")}});
  if (layout.absent_rotary_fraction != 1) out.push_back({"attention.rotary_fraction", {}});
  if (layout.post_norm) out.push_back({"post_norm", {"[\"attention\"]"}});
  if (!layout.scaled) return out;
  for (const char* scale :
       {"embedding_scale", "residual_scale", "logit_divisor", "attention.softmax_scale"})
    out.push_back({scale, {}});
  return out;
}

nlohmann::json decoder_config(const Expanded& m, const DecoderLayout& layout) {
  Names kinds;
  for (const std::string& mixer : mixers_of(m)) {
    const auto kind = std::ranges::find(layout.kinds, mixer, &LayerKind::mixer);
    if (kind == layout.kinds.end()) fail("model.pattern: the layout has no layers of '{}'", mixer);
    kinds.push_back(kind->theirs);
  }
  nlohmann::json config = {{"architectures", {layout.architecture}},
                           {"hidden_size", m.get<int64_t>("d_model")},
                           {"num_hidden_layers", kinds.size()},
                           {layout.eps, m.get<double>("norm_eps")},
                           {"tie_word_embeddings", m.get<bool>("tie_embeddings")}};
  if (layout.kinds.size() > 1) config["layer_types"] = kinds;
  if (m.has("attention")) config.update(attention_config(m, layout));
  return config;
}

// ---- Tensors ----

namespace {

// `ours` "layers_0.mixer.", `theirs` "model.layers.0.self_attn."
void add_attention(std::vector<Rule>& rules, const Expanded& m, const DecoderLayout& layout,
                   const std::string& ours, const std::string& theirs) {
  const AttentionShape shape = attention_shape(m);
  const auto add = [&](const std::string& kind) {
    Part q{theirs + "q_proj." + kind, shape.heads};
    Rule::Range gates;
    if (layout.gate == "element") {  // theirs: of each head, the query and then the gate
      q.share = 2 * shape.heads;
      q.sections = {shape.head_dim, shape.head_dim};
      q.groups = shape.heads;
      gates = {shape.heads, shape.heads};
    }
    rules.push_back({ours + "qkv." + kind,
                     {q,
                      {theirs + "k_proj." + kind, shape.kv_heads},
                      {theirs + "v_proj." + kind, shape.kv_heads}},
                     gates});
    if (kind == "weight" || !layout.qkv_bias)
      rules.push_back({ours + "out_proj." + kind, {{theirs + layout.out_proj + "." + kind}}});
  };
  add("weight");
  if (m.get<bool>("attention.bias") || layout.qkv_bias) add("bias");
  if (layout.qk_rmsnorm == "none") return;
  rules.push_back({ours + "q_norm.weight", {{theirs + layout.q_norm + ".weight"}}});
  rules.push_back({ours + "k_norm.weight", {{theirs + layout.k_norm + ".weight"}}});
}

}  // namespace

std::vector<Rule> decoder_rules(const Expanded& m, const DecoderLayout& layout, LayerRules add) {
  std::vector<Rule> out = {{"embedding", {{"model.embed_tokens.weight"}}},
                           {"norm.weight", {{"model." + layout.final_norm + ".weight"}}}};
  if (!m.get<bool>("tie_embeddings")) out.push_back({"head.weight", {{"lm_head.weight"}}});
  int64_t i = 0;
  for (const std::string& mixer : mixers_of(m)) {
    const std::string ours = fmt::format("layers_{}.", i);
    const std::string theirs = fmt::format("model.layers.{}.", i);
    ++i;
    const LayerKind& kind = *std::ranges::find(layout.kinds, mixer, &LayerKind::mixer);
    const auto name = [&](const std::string& own, const std::string& common) {
      return theirs + (own.empty() ? common : own) + ".weight";
    };
    out.push_back({ours + "mixer_norm.weight", {{name(kind.mixer_norm, layout.mixer_norm)}}});
    out.push_back({ours + "channel_norm.weight", {{name(kind.channel_norm, layout.channel_norm)}}});
    if (mixer == "attention") add_attention(out, m, layout, ours + "mixer.", theirs + "self_attn.");
    add(out, m, mixer, ours, theirs);
  }
  return out;
}

// ---- The gated delta rule ----

std::vector<Value> linear_attention_values(const Settings& s, const DeltaShape& absent) {
  return {
      s.as<int64_t>("gated_delta_net.num_heads", "linear_num_value_heads", absent.heads),
      s.as<int64_t>("gated_delta_net.num_key_heads", "linear_num_key_heads", absent.key_heads),
      s.as<int64_t>("gated_delta_net.head_dim", "linear_key_head_dim", absent.key_dim),
      s.as<int64_t>("gated_delta_net.value_head_dim", "linear_value_head_dim", absent.value_dim),
      s.as<int64_t>("gated_delta_net.conv_width", "linear_conv_kernel_dim", 4)};
}

nlohmann::json linear_attention_config(const Expanded& m) {
  if (!m.has("gated_delta_net")) return nlohmann::json::object();
  const DeltaShape shape = delta_shape(m);
  const auto conv_width = m.get<int64_t>("gated_delta_net.conv_width");
  if (conv_width == 0) fail("model.gated_delta_net.conv_width must be positive");
  return {{"linear_conv_kernel_dim", conv_width},
          {"linear_key_head_dim", shape.key_dim},
          {"linear_num_key_heads", shape.key_heads},
          {"linear_num_value_heads", shape.heads},
          {"linear_value_head_dim", shape.value_dim}};
}

}  // namespace assay::exchange
