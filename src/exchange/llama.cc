// Llama and its kin: attention in every layer, rotary positions on the two halves of a head,
// RMSNorm, a gated feed-forward layer. Mistral has a window, Qwen2 biases on queries, keys and
// values, Qwen3 norms of queries and keys. hidden_act "silu" is our swiglu, "gelu_pytorch_tanh" our
// geglu.
#include "exchange/decoder.h"

namespace assay::exchange {
namespace {

const std::vector<std::string> kGated = {"\"swiglu\"", "\"geglu\""};
const DecoderLayout kLlama = {.architecture = "LlamaForCausalLM", .channel_mixers = kGated};
const DecoderLayout kMistral = {
    .architecture = "MistralForCausalLM", .channel_mixers = kGated, .windows = true};
const DecoderLayout kQwen2 = {
    .architecture = "Qwen2ForCausalLM", .channel_mixers = kGated, .qkv_bias = true};
const DecoderLayout kQwen3 = {.architecture = "Qwen3ForCausalLM",
                              .channel_mixers = kGated,
                              .absent_head_dim = 128,
                              .qk_rmsnorm = "head"};

std::vector<Value> values(const Settings& s, const DecoderLayout& layout) {
  s.expect("hidden_act", {"silu", "gelu_pytorch_tanh", "gelu_new"});
  const std::string mixer = s.get<std::string>("hidden_act", "silu") == "silu" ? "swiglu" : "geglu";
  std::vector<Value> out = decoder_values(s, layout, {"attention"});
  out.push_back({"channel_mixer", mixer, s.place("hidden_act")});
  out.push_back(s.as<int64_t>("max_positions", "max_position_embeddings", 2048));
  out.push_back(s.as<int64_t>(mixer + ".d_ff", "intermediate_size"));
  out.push_back(s.as<bool>(mixer + ".bias", "mlp_bias", false));
  return out;
}

std::string channel_mixer(const Expanded& m) { return m.get<std::string>("channel_mixer"); }

nlohmann::json config(const Expanded& m, const DecoderLayout& layout) {
  const std::string mixer = channel_mixer(m);
  const auto longest = m.get<int64_t>("max_positions");
  nlohmann::json out = decoder_config(m, layout);
  out.update({{"hidden_act", mixer == "swiglu" ? "silu" : "gelu_pytorch_tanh"},
              {"intermediate_size", gated_width(m, mixer)},
              {"max_position_embeddings", longest ? longest : 2048}});
  return out;
}

std::vector<Rule> rules(const Expanded& m, const DecoderLayout& layout) {
  return decoder_rules(m, layout,
                       [](std::vector<Rule>& out, const Expanded& model, const std::string&,
                          const std::string& ours, const std::string& theirs) {
                         add_gated_mlp(out, ours, theirs);
                         if (model.get<bool>(channel_mixer(model) + ".bias"))
                           add_gated_mlp(out, ours, theirs, "bias");
                       });
}

std::vector<Requirement> llama_requirements() {
  auto out = decoder_requirements(kLlama);
  for (const char* mixer : {"swiglu.bias", "geglu.bias"}) out.push_back({mixer, {}});
  return out;
}

// Qwen2 and Qwen3 have windows in the layers from max_window_layers on.
void expect_no_windows(const Settings& s) {
  s.expect("use_sliding_window", {false});
  pattern_of(s, kQwen3, each_nth(s, "", 1, kQwen3));
}

const bool llama =
    families().add("llama", {.prefix = "model.",
                             .left_out = {R"(rotary_emb\.inv_freq)"},
                             .requires_ = llama_requirements(),
                             .values = [](const Settings& s) { return values(s, kLlama); },
                             .config =
                                 [](const Expanded& m) {
                                   nlohmann::json out = config(m, kLlama);
                                   out["mlp_bias"] = m.get<bool>(channel_mixer(m) + ".bias");
                                   return out;
                                 },
                             .rules = [](const Expanded& m) { return rules(m, kLlama); }});

const bool mistral = families().add(
    "mistral", {.prefix = "model.",
                .left_out = {R"(rotary_emb\.inv_freq)"},
                .requires_ = decoder_requirements(kMistral),
                .values =
                    [](const Settings& s) {
                      auto out = values(s, kMistral);
                      const int64_t absent = s.is_null("sliding_window") ? -1 : 4096;
                      out.push_back(s.as<int64_t>("attention.window", "sliding_window", absent));
                      return out;
                    },
                .config =
                    [](const Expanded& m) {
                      nlohmann::json out = config(m, kMistral);
                      const auto window = m.get<int64_t>("attention.window");
                      out["sliding_window"] =
                          window < 0 ? nlohmann::json() : nlohmann::json(window);
                      if (m.get<bool>("attention.bias")) fail("model.attention.bias must be false");
                      return out;
                    },
                .rules = [](const Expanded& m) { return rules(m, kMistral); },
                .on_request = true});

const bool qwen2 =
    families().add("qwen2", {.prefix = "model.",
                             .left_out = {R"(rotary_emb\.inv_freq)"},
                             .requires_ = decoder_requirements(kQwen2),
                             .values =
                                 [](const Settings& s) {
                                   expect_no_windows(s);
                                   return values(s, kQwen2);
                                 },
                             .config = [](const Expanded& m) { return config(m, kQwen2); },
                             .rules = [](const Expanded& m) { return rules(m, kQwen2); }});

const bool qwen3 =
    families().add("qwen3", {.prefix = "model.",
                             .left_out = {},
                             .requires_ = decoder_requirements(kQwen3),
                             .values =
                                 [](const Settings& s) {
                                   expect_no_windows(s);
                                   return values(s, kQwen3);
                                 },
                             .config = [](const Expanded& m) { return config(m, kQwen3); },
                             .rules = [](const Expanded& m) { return rules(m, kQwen3); }});

}  // namespace
}  // namespace assay::exchange
