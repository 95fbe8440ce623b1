// Qwen3-Next with dense feed-forward layers, and the text of Qwen3.5, which stores the projections
// of the gated delta net apart. Attention has an output gate and turns a part of each head.
#include "exchange/decoder.h"

namespace assay::exchange {
namespace {

DecoderLayout layout(std::string architecture) {
  return {.architecture = std::move(architecture),
          .kinds = {{"full_attention", "attention"}, {"linear_attention", "gated_delta_net"}},
          .norm = "zero_centered_rmsnorm",
          .absent_rotary_fraction = 0.25,
          .absent_head_dim = 256,
          .qk_rmsnorm = "zero_centered_head",
          .gate = "element"};
}
const DecoderLayout kNext = layout("Qwen3NextForCausalLM");
const DecoderLayout kText = layout("Qwen3_5ForCausalLM");

std::vector<Value> values(const Settings& s) {
  s.expect("hidden_act", {"silu"});
  const Names pattern = pattern_of(s, kNext, each_nth(s, "full_attention_interval", 4, kNext));
  std::vector<Value> out = decoder_values(s, kNext, pattern);
  out.push_back({"channel_mixer", "swiglu"});
  out.push_back(s.as<int64_t>("swiglu.d_ff", "intermediate_size"));
  if (!has_mixer(pattern, "gated_delta_net")) return out;
  for (Value& value : linear_attention_values(s, {32, 16, 128, 128}))
    out.push_back(std::move(value));
  out.push_back(s.as<double>("gated_delta_net.norm_eps", "rms_norm_eps", 1e-6));
  return out;
}

nlohmann::json config(const Expanded& m, const DecoderLayout& layout) {
  nlohmann::json out = decoder_config(m, layout);
  out.update(linear_attention_config(m));
  if (m.has("gated_delta_net") &&
      m.get<double>("gated_delta_net.norm_eps") != m.get<double>("norm_eps"))
    fail("model.gated_delta_net.norm_eps must be model.norm_eps");
  out.update({{"hidden_act", "silu"}, {"intermediate_size", gated_width(m, "swiglu")}});
  // With a cache, transformers 5.24 needs an attention layer
  if (!m.has("attention")) out["use_cache"] = false;
  return out;
}

nlohmann::json next_config(const Expanded& m) {
  nlohmann::json out = config(m, kNext);
  std::vector<int64_t> dense;
  for (int64_t i = 0; i < m.get<int64_t>("num_layers"); ++i) dense.push_back(i);
  out.update({{"decoder_sparse_step", 1}, {"mlp_only_layers", dense}, {"num_experts", 0}});
  return out;
}

// The tensors of a layer that both layouts store alike.
void add_shared(std::vector<Rule>& out, const std::string& mixer, const std::string& ours,
                const std::string& theirs) {
  add_gated_mlp(out, ours, theirs);
  if (mixer != "gated_delta_net") return;
  const std::string a = theirs + "linear_attn.";
  out.push_back({ours + "mixer.conv.weight", {{a + "conv1d.weight", 1, Layout::unsqueezed}}});
  for (const char* same : {"A_log", "dt_bias", "norm.weight", "out_proj.weight"})
    out.push_back({ours + "mixer." + same, {{a + same}}});
}

void add_next_layer(std::vector<Rule>& out, const Expanded& m, const std::string& mixer,
                    const std::string& ours, const std::string& theirs) {
  add_shared(out, mixer, ours, theirs);
  if (mixer != "gated_delta_net") return;
  const DeltaShape shape = delta_shape(m);
  // Heads that share one key head, and the width of their values
  const int64_t shared = shape.heads / shape.key_heads;
  const int64_t values = shared * shape.value_dim;
  const std::string a = theirs + "linear_attn.";
  out.push_back({ours + "mixer.qkvz_proj.weight",
                 {{a + "in_proj_qkvz.weight",
                   1,
                   Layout::same,
                   {shape.key_dim, shape.key_dim, values, values},
                   shape.key_heads}}});
  out.push_back({ours + "mixer.ba_proj.weight",
                 {{a + "in_proj_ba.weight", 1, Layout::same, {shared, shared}, shape.key_heads}}});
}

void add_text_layer(std::vector<Rule>& out, const Expanded& m, const std::string& mixer,
                    const std::string& ours, const std::string& theirs) {
  add_shared(out, mixer, ours, theirs);
  if (mixer != "gated_delta_net") return;
  const DeltaShape shape = delta_shape(m);
  const int64_t keys = shape.key_heads * shape.key_dim;
  const int64_t values = shape.heads * shape.value_dim;
  const std::string a = theirs + "linear_attn.";
  out.push_back(
      {ours + "mixer.qkvz_proj.weight",
       {{a + "in_proj_qkv.weight", 2 * keys + values}, {a + "in_proj_z.weight", values}}});
  out.push_back(
      {ours + "mixer.ba_proj.weight", {{a + "in_proj_b.weight"}, {a + "in_proj_a.weight"}}});
}

const bool next = families().add(
    "qwen3_next",
    {.prefix = "model.",
     .left_out = {R"(mtp\..*)"},
     .requires_ = decoder_requirements(kNext),
     .values =
         [](const Settings& s) {
           s.expect("num_experts", {0});
           return values(s);
         },
     .config = next_config,
     .rules = [](const Expanded& m) { return decoder_rules(m, kNext, add_next_layer); }});

const bool text = families().add(
    "qwen3_5_text",
    {.prefix = "model.",
     .left_out = {R"(model\.visual\..*)", R"(mtp\..*)"},
     .requires_ = decoder_requirements(kText),
     .values = values,
     .config = [](const Expanded& m) { return config(m, kText); },
     .rules = [](const Expanded& m) { return decoder_rules(m, kText, add_text_layer); },
     .multimodal = "qwen3_5",
     .on_request = true});

}  // namespace
}  // namespace assay::exchange
