#pragma once
// Layouts of transformers in which layers of several kinds may alternate: what they share. A layout
// is a table, and functions for what no other layout has.
#include "exchange/family.h"

namespace assay::exchange {

// A kind of layer in layer_types, our mixer, and the names of its norms, if they are not those of
// the layout.
struct LayerKind {
  std::string theirs;
  std::string mixer;
  std::string mixer_norm = "";
  std::string channel_norm = "";
};

struct DecoderLayout {
  std::string architecture;
  std::vector<LayerKind> kinds = {{"full_attention", "attention"}};
  std::vector<std::string> channel_mixers = {"\"swiglu\""};  // accepted, as TOML
  std::string norm = "rmsnorm";
  std::string eps = "rms_norm_eps";
  // Meaning of absent settings
  double absent_eps = 1e-6;
  double absent_rope_base = 10000;
  double absent_rotary_fraction = 1;
  int64_t absent_head_dim = 0;
  bool absent_tie = false;
  // Fields of attention
  std::string qk_rmsnorm = "none";
  std::string gate = "none";
  bool qkv_bias = false;            // biases on queries, keys and values, and none on the output
  bool windows = false;             // attention.window may be any
  bool optional_positions = false;  // attention.position may be "none"
  bool scaled = false;     // attention.softmax_scale and the scales of the model may be any
  bool post_norm = false;  // in the layers of attention
  // Names of tensors
  std::string mixer_norm = "input_layernorm";
  std::string channel_norm = "post_attention_layernorm";
  std::string final_norm = "norm";
  std::string out_proj = "o_proj";
  std::string q_norm = "q_norm";
  std::string k_norm = "k_norm";
};

// The pattern that layer_types names; `absent` without it.
Names pattern_of(const Settings& s, const DecoderLayout& layout, const Names& absent);
// layer_types in which each n-th layer has the first kind and the others have the second one; `key`
// holds n.
Names each_nth(const Settings& s, const std::string& key, int64_t absent,
               const DecoderLayout& layout);
Names mixers_of(const Expanded& m);  // of each layer
bool has_mixer(const Names& pattern, const std::string& mixer);

// Sizes, pattern, norms, tie and the values of attention, if there is any.
std::vector<Value> decoder_values(const Settings& s, const DecoderLayout& layout,
                                  const Names& pattern);
std::vector<Requirement> decoder_requirements(const DecoderLayout& layout);
nlohmann::json decoder_config(const Expanded& m, const DecoderLayout& layout);
// All but the mixers of other kinds than attention and the channel mixers. Then `add` adds those of
// a layer: ours "layers_0.", theirs "model.layers.0."
using LayerRules = void (*)(std::vector<Rule>& rules, const Expanded& m, const std::string& mixer,
                            const std::string& ours, const std::string& theirs);
std::vector<Rule> decoder_rules(const Expanded& m, const DecoderLayout& layout, LayerRules add);

// gated_delta_net with linear_num_value_heads and so on. `absent`: what absent settings mean.
std::vector<Value> linear_attention_values(const Settings& s, const DeltaShape& absent);
nlohmann::json linear_attention_config(const Expanded& m);

}  // namespace assay::exchange
