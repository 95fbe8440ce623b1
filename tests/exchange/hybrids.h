#pragma once
#include <map>
#include <string>

namespace assay::exchange {

// config.json of a small model of each layout of several kinds of layers.
inline const std::map<std::string, const char*> kHybrids = {
    {"lfm2", R"({"model_type": "lfm2", "vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 3,
  "num_attention_heads": 2, "block_ff_dim": 12, "full_attn_idxs": [1], "conv_bias": true})"},
    {"qwen3_next", R"({"model_type": "qwen3_next", "vocab_size": 11, "hidden_size": 8,
  "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
  "intermediate_size": 12, "num_experts": 0, "full_attention_interval": 2, "attention_bias": true,
  "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 3,
  "linear_value_head_dim": 5})"},
    {"qwen3_5", R"({"model_type": "qwen3_5", "text_config": {"vocab_size": 11, "hidden_size": 8,
  "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
  "intermediate_size": 12, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
  "linear_key_head_dim": 3, "linear_value_head_dim": 5}})"},
    {"olmo_hybrid", R"({"model_type": "olmo_hybrid", "vocab_size": 11, "hidden_size": 8,
  "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 12,
  "rope_parameters": {"rope_theta": null}})"},
    {"granitemoehybrid", R"({"model_type": "granitemoehybrid", "vocab_size": 11, "hidden_size": 8,
  "num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "num_attention_heads": 2,
  "num_local_experts": 0, "shared_intermediate_size": 12, "mamba_n_heads": 4, "mamba_d_state": 4,
  "residual_multiplier": 0.3, "logits_scaling": 3})"},
    {"qwen2", R"({"model_type": "qwen2", "vocab_size": 11, "hidden_size": 8,
  "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12})"}};

}  // namespace assay::exchange
