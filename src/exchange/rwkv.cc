// RWKV-7 as flash-linear-attention has it, and RWKV-5, 6 and 7 under the names of RWKV-LM.
// RWKV-LM has no config.json: give model_type (rwkv_lm_x052, _x060 or _x070) and the arguments
// n_embd, n_layer, dim_ffn, head_size, vocab_size of its trainer, for x070 also d_decay_lora,
// d_aaa_lora, d_mv_lora, d_gate_lora.
#include "nn/rwkv.h"

#include "exchange/family.h"

namespace assay::exchange {
namespace {

constexpr Layout kRow = Layout::unsqueezed;
constexpr Layout kVector = Layout::flattened;
constexpr Layout kIn = Layout::transposed;

std::vector<Requirement> requirements(const std::string& mixer, const std::string& channel_mixer) {
  return {{"pattern", {"[\"" + mixer + "\"]"}},
          {"channel_mixer", {"\"" + channel_mixer + "\""}},
          {"norm", {"\"layernorm\""}},
          {"embedding_norm", {"true"}},
          {"positions", {"\"none\""}}};
}

// Values that all layouts of RWKV have in common, followed by `more`.
std::vector<Value> model_values(const std::string& mixer, const std::string& channel_mixer,
                                const std::vector<Value>& more) {
  std::vector<Value> out = {{"pattern", Names{mixer}},
                            {"channel_mixer", channel_mixer},
                            {"norm", "layernorm"},
                            {"embedding_norm", true}};
  out.insert(out.end(), more.begin(), more.end());
  return out;
}

int64_t heads_of(int64_t width, int64_t head_dim) { return head_dim > 0 ? width / head_dim : 0; }
int64_t heads_of(const Expanded& m, const std::string& mixer) {
  const auto heads = m.get<int64_t>(mixer + ".num_heads");
  return heads > 0 ? heads : m.get<int64_t>("d_model") / 64;
}
int64_t head_dim_of(const Expanded& m, const std::string& mixer) {
  return m.get<int64_t>("d_model") / std::max<int64_t>(heads_of(m, mixer), 1);
}

// theirs + letter for each letter: a row each.
std::vector<Part> rows(const std::string& theirs, const std::string& letters) {
  std::vector<Part> out;
  for (const char letter : letters) out.push_back({theirs + letter, 1, kRow});
  return out;
}

// weight and bias
void add_norm(std::vector<Rule>& out, const std::string& ours, const std::string& theirs) {
  for (const char* kind : {".weight", ".bias"}) out.push_back({ours + kind, {{theirs + kind}}});
}

// ---- rwkv7 of flash-linear-attention ----

// fla computes a rank that is null from the width, and its versions do so in different ways.
Value fla_rank(const Settings& s, const std::string& ours, const std::string& theirs,
               const std::string& lora) {
  if (!s.has(theirs))
    fail(
        "{} is missing or null. Write the number of rows of 'attn.{}.lora.0.weight' there. "
        "Nothing was written.",
        s.place(theirs), lora);
  return s.as<int64_t>(ours, theirs);
}

std::vector<Value> fla_values(const Settings& s) {
  s.expect("attn", {});
  s.expect("hidden_act", {"sqrelu"});
  s.expect("norm_first", {true});
  s.expect("norm_bias", {true});
  const auto width = s.get<int64_t>("hidden_size");
  const auto head_dim = s.get<int64_t>("head_dim", 64);
  const auto eps = s.get<double>("norm_eps", 1e-5);
  const int64_t hidden = width * s.get<int64_t>("hidden_ratio", 4);
  return model_values("rwkv7", "rwkv7_channel_mix",
                      {s.as<int64_t>("vocab_size", "vocab_size"),
                       s.as<int64_t>("d_model", "hidden_size"),
                       s.as<int64_t>("num_layers", "num_hidden_layers"),
                       s.as<double>("norm_eps", "norm_eps", 1e-5),
                       s.as<bool>("tie_embeddings", "tie_word_embeddings", false),
                       s.as<int64_t>("rwkv7_channel_mix.d_ff", "intermediate_size", hidden),
                       {"rwkv7.num_heads", heads_of(width, head_dim), s.place("head_dim")},
                       fla_rank(s, "rwkv7.decay_rank", "decay_low_rank_dim", "w_lora"),
                       fla_rank(s, "rwkv7.rate_rank", "a_low_rank_dim", "a_lora"),
                       fla_rank(s, "rwkv7.value_rank", "v_low_rank_dim", "v_lora"),
                       fla_rank(s, "rwkv7.gate_rank", "gate_low_rank_dim", "g_lora"),
                       {"rwkv7.norm_eps", double(head_dim) * eps, s.place("norm_eps")}});
}

int64_t rank_of(const Expanded& m, const std::string& field, double factor) {
  const auto rank = m.get<int64_t>("rwkv7." + field);
  return rank > 0 ? rank : rwkv::default_rank(factor, m.get<int64_t>("d_model"));
}

nlohmann::json fla_config(const Expanded& m) {
  const auto width = m.get<int64_t>("d_model");
  const auto d_ff = m.get<int64_t>("rwkv7_channel_mix.d_ff");
  const auto head_dim = head_dim_of(m, "rwkv7");
  const auto eps = m.get<double>("norm_eps");
  if (m.get<double>("rwkv7.norm_eps") != double(head_dim) * eps)
    fail("model.rwkv7.norm_eps must be model.norm_eps times the {} channels of a head", head_dim);
  return {{"a_low_rank_dim", rank_of(m, "rate_rank", 2.5)},
          {"architectures", {"RWKV7ForCausalLM"}},
          {"attn", nullptr},
          {"decay_low_rank_dim", rank_of(m, "decay_rank", 2.5)},
          {"gate_low_rank_dim", rank_of(m, "gate_rank", 5)},
          {"head_dim", head_dim},
          {"hidden_act", "sqrelu"},
          {"hidden_size", width},
          {"intermediate_size", d_ff > 0 ? d_ff : 4 * width},
          {"norm_bias", true},
          {"norm_eps", eps},
          {"norm_first", true},
          {"num_hidden_layers", m.get<int64_t>("num_layers")},
          {"tie_word_embeddings", m.get<bool>("tie_embeddings")},
          {"v_low_rank_dim", rank_of(m, "value_rank", 1.7)}};
}

void add_fla_low_rank(std::vector<Rule>& out, const std::string& ours, const std::string& theirs,
                      bool bias) {
  out.push_back({ours + ".down_proj.weight", {{theirs + ".lora.0.weight"}}});
  out.push_back({ours + ".up_proj.weight", {{theirs + ".lora.2.weight"}}});
  if (bias) out.push_back({ours + ".up_proj.bias", {{theirs + ".lora.2.bias"}}});
}

std::vector<Rule> fla_rules(const Expanded& m) {
  std::vector<Rule> out = {{"embedding", {{"model.embeddings.weight"}}}};
  add_norm(out, "norm", "model.norm");
  add_norm(out, "embedding_norm", "model.layers.0.pre_norm");
  if (!m.get<bool>("tie_embeddings")) out.push_back({"head.weight", {{"lm_head.weight"}}});
  for (int64_t i = 0; i < m.get<int64_t>("num_layers"); ++i) {
    const std::string layer = fmt::format("layers_{}.", i);
    const std::string ours = layer + "mixer.";
    const std::string theirs = fmt::format("model.layers.{}.", i);
    const std::string a = theirs + "attn.";
    add_norm(out, layer + "mixer_norm", theirs + "attn_norm");
    add_norm(out, layer + "channel_norm", theirs + "ffn_norm");
    add_norm(out, ours + "norm", a + "g_norm");
    out.push_back({ours + "mix", rows(a + "x_", "rwkvag")});
    for (const char* same :
         {"r_proj.weight", "k_proj.weight", "v_proj.weight", "k_k", "k_a", "r_k"})
      out.push_back({ours + same, {{a + same}}});
    out.push_back({ours + "out_proj.weight", {{a + "o_proj.weight"}}});
    add_fla_low_rank(out, ours + "decay", a + "w_lora", true);
    add_fla_low_rank(out, ours + "rate", a + "a_lora", true);
    add_fla_low_rank(out, ours + "gate", a + "g_lora", false);
    if (i > 0) add_fla_low_rank(out, ours + "value_mix", a + "v_lora", true);
    out.push_back({layer + "channel_mixer.mix", {{theirs + "ffn.x_k", 1, Layout::row}}});
    out.push_back({layer + "channel_mixer.in_proj.weight", {{theirs + "ffn.key.weight"}}});
    out.push_back({layer + "channel_mixer.out_proj.weight", {{theirs + "ffn.value.weight"}}});
  }
  return out;
}

const bool fla_rwkv7 =
    families().add("rwkv7", {.prefix = "model.",
                             .left_out = {},
                             .requires_ = requirements("rwkv7", "rwkv7_channel_mix"),
                             .values = fla_values,
                             .config = fla_config,
                             .rules = fla_rules,
                             .library = "fla"});

// ---- RWKV-LM ----

std::vector<Value> lm_values(const Settings& s, const std::string& mixer,
                             const std::string& channel_mixer) {
  const auto width = s.get<int64_t>("n_embd");
  const auto head_size = s.get<int64_t>("head_size", 64);
  return model_values(mixer, channel_mixer,
                      {s.as<int64_t>("vocab_size", "vocab_size"),
                       s.as<int64_t>("d_model", "n_embd"),
                       s.as<int64_t>("num_layers", "n_layer"),
                       {"norm_eps", 1e-5},
                       {"tie_embeddings", false},
                       s.as<int64_t>(channel_mixer + ".d_ff", "dim_ffn"),
                       {mixer + ".num_heads", heads_of(width, head_size), s.place("head_size")}});
}

nlohmann::json lm_config(const Expanded& m, const std::string& mixer,
                         const std::string& channel_mixer, double eps) {
  const auto width = m.get<int64_t>("d_model");
  const auto d_ff = m.get<int64_t>(channel_mixer + ".d_ff");
  if (m.get<double>("norm_eps") != 1e-5 || m.get<double>(mixer + ".norm_eps") != eps)
    fail("model.norm_eps must be 1e-5, model.{}.norm_eps {}", mixer, eps);
  return {{"dim_ffn", d_ff > 0           ? d_ff
                      : mixer == "rwkv7" ? 4 * width
                                         : width * 7 / 2 / 32 * 32},
          {"head_size", head_dim_of(m, mixer)},
          {"n_embd", width},
          {"n_layer", m.get<int64_t>("num_layers")}};
}

using LayerRules = void (*)(std::vector<Rule>& out, const std::string& ours,
                            const std::string& theirs, bool first);

std::vector<Rule> lm_rules(const Expanded& m, LayerRules rules) {
  std::vector<Rule> out = {{"embedding", {{"emb.weight"}}}, {"head.weight", {{"head.weight"}}}};
  add_norm(out, "norm", "ln_out");
  add_norm(out, "embedding_norm", "blocks.0.ln0");
  for (int64_t i = 0; i < m.get<int64_t>("num_layers"); ++i) {
    const std::string ours = fmt::format("layers_{}.", i);
    const std::string theirs = fmt::format("blocks.{}.", i);
    add_norm(out, ours + "mixer_norm", theirs + "ln1");
    add_norm(out, ours + "channel_norm", theirs + "ln2");
    add_norm(out, ours + "mixer.norm", theirs + "att.ln_x");
    out.push_back({ours + "mixer.r_proj.weight", {{theirs + "att.receptance.weight"}}});
    out.push_back({ours + "mixer.k_proj.weight", {{theirs + "att.key.weight"}}});
    out.push_back({ours + "mixer.v_proj.weight", {{theirs + "att.value.weight"}}});
    out.push_back({ours + "mixer.out_proj.weight", {{theirs + "att.output.weight"}}});
    out.push_back({ours + "channel_mixer.in_proj.weight", {{theirs + "ffn.key.weight"}}});
    out.push_back({ours + "channel_mixer.out_proj.weight", {{theirs + "ffn.value.weight"}}});
    rules(out, ours, theirs, i == 0);
  }
  return out;
}

void add_gates(std::vector<Rule>& out, const std::string& ours, const std::string& theirs) {
  out.push_back({ours + "mixer.g_proj.weight", {{theirs + "att.gate.weight"}}});
  out.push_back({ours + "mixer.bonus", {{theirs + "att.time_faaaa"}}});
  out.push_back({ours + "channel_mixer.r_proj.weight", {{theirs + "ffn.receptance.weight"}}});
}

void x052(std::vector<Rule>& out, const std::string& ours, const std::string& theirs, bool) {
  const std::string a = theirs + "att.time_mix_";
  const std::string f = theirs + "ffn.time_mix_";
  add_gates(out, ours, theirs);
  out.push_back({ours + "mixer.mix", rows(a, "kvrg")});
  out.push_back({ours + "mixer.decay", {{theirs + "att.time_decay"}}});
  out.push_back({ours + "channel_mixer.mix", rows(f, "kr")});
}

void x060(std::vector<Rule>& out, const std::string& ours, const std::string& theirs, bool) {
  const std::string a = theirs + "att.time_maa_";
  const std::string f = theirs + "ffn.time_maa_";
  const std::string d = theirs + "att.time_decay";
  add_gates(out, ours, theirs);
  out.push_back({ours + "mixer.mix_x", {{a + "x", 1, kVector}}});
  out.push_back({ours + "mixer.mix", rows(a, "wkvrg")});
  out.push_back({ours + "mixer.mix_proj.weight", {{a + "w1", 1, kIn}}});
  out.push_back({ours + "mixer.mix_up", {{a + "w2"}}});
  out.push_back({ours + "mixer.decay.up_proj.bias", {{d, 1, kVector}}});
  out.push_back({ours + "mixer.decay.down_proj.weight", {{d + "_w1", 1, kIn}}});
  out.push_back({ours + "mixer.decay.up_proj.weight", {{d + "_w2", 1, kIn}}});
  out.push_back({ours + "channel_mixer.mix", rows(f, "kr")});
}

void x070(std::vector<Rule>& out, const std::string& ours, const std::string& theirs, bool first) {
  const std::string a = theirs + "att.";
  const auto low_rank = [&](const std::string& part, const std::string& letter, bool bias) {
    out.push_back({ours + "mixer." + part + ".down_proj.weight", {{a + letter + "1", 1, kIn}}});
    out.push_back({ours + "mixer." + part + ".up_proj.weight", {{a + letter + "2", 1, kIn}}});
    if (bias)
      out.push_back({ours + "mixer." + part + ".up_proj.bias", {{a + letter + "0", 1, kVector}}});
  };
  low_rank("decay", "w", true);
  low_rank("rate", "a", true);
  low_rank("gate", "g", false);
  if (!first) low_rank("value_mix", "v", true);
  out.push_back({ours + "mixer.mix", rows(a + "x_", "rwkvag")});
  out.push_back({ours + "mixer.k_k", {{a + "k_k", 1, kVector}}});
  out.push_back({ours + "mixer.k_a", {{a + "k_a", 1, kVector}}});
  out.push_back({ours + "mixer.r_k", {{a + "r_k"}}});
  out.push_back({ours + "channel_mixer.mix", {{theirs + "ffn.x_k", 1, kRow}}});
}

std::vector<Value> x070_values(const Settings& s) {
  std::vector<Value> out = lm_values(s, "rwkv7", "rwkv7_channel_mix");
  out.push_back(s.as<int64_t>("rwkv7.decay_rank", "d_decay_lora", 0));
  out.push_back(s.as<int64_t>("rwkv7.rate_rank", "d_aaa_lora", 0));
  out.push_back(s.as<int64_t>("rwkv7.value_rank", "d_mv_lora", 0));
  out.push_back(s.as<int64_t>("rwkv7.gate_rank", "d_gate_lora", 0));
  return out;
}

nlohmann::json x070_config(const Expanded& m) {
  nlohmann::json config = lm_config(m, "rwkv7", "rwkv7_channel_mix", 64e-5);
  config.update({{"d_aaa_lora", rank_of(m, "rate_rank", 2.5)},
                 {"d_decay_lora", rank_of(m, "decay_rank", 2.5)},
                 {"d_gate_lora", rank_of(m, "gate_rank", 5)},
                 {"d_mv_lora", rank_of(m, "value_rank", 1.7)}});
  return config;
}

using Values = std::vector<Value> (*)(const Settings&);
using Config = nlohmann::json (*)(const Expanded&);
using Rules = std::vector<Rule> (*)(const Expanded&);

// RWKV-LM's training code gives block 0 alone the norm ln0. Its demos give one to each block, and
// use that of block 0 only. Block 0 of x070 holds v0, v1 and v2 unused.
const std::vector<std::string> kUnused = {R"(^blocks\.[1-9][0-9]*\.ln0\.(weight|bias))",
                                          R"(^blocks\.0\.att\.v[012])"};

bool add_lm(const char* name, const char* mixer, const char* channel_mixer, Values values,
            Config config, Rules rules) {
  auto required = requirements(mixer, channel_mixer);
  required.push_back({"tie_embeddings", {"false"}});
  return families().add(name, {.prefix = "",
                               .left_out = kUnused,
                               .requires_ = std::move(required),
                               .values = values,
                               .config = config,
                               .rules = rules,
                               .library = ""});
}

const bool lm_x052 = add_lm(
    "rwkv_lm_x052", "rwkv5", "rwkv5_channel_mix",
    [](const Settings& s) { return lm_values(s, "rwkv5", "rwkv5_channel_mix"); },
    [](const Expanded& m) { return lm_config(m, "rwkv5", "rwkv5_channel_mix", 1e-5); },
    [](const Expanded& m) { return lm_rules(m, x052); });
const bool lm_x060 = add_lm(
    "rwkv_lm_x060", "rwkv6", "rwkv6_channel_mix",
    [](const Settings& s) { return lm_values(s, "rwkv6", "rwkv6_channel_mix"); },
    [](const Expanded& m) { return lm_config(m, "rwkv6", "rwkv6_channel_mix", 64e-5); },
    [](const Expanded& m) { return lm_rules(m, x060); });
const bool lm_x070 = add_lm("rwkv_lm_x070", "rwkv7", "rwkv7_channel_mix", x070_values, x070_config,
                            [](const Expanded& m) { return lm_rules(m, x070); });

}  // namespace
}  // namespace assay::exchange
