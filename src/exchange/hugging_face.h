#pragma once
// Models in Hugging Face's layout: a folder with config.json and model.safetensors (or its
// shards). The families register themselves in files beside this one; where two have a model's
// layout, the first by name is written unless `layout` names another (rwkv7: that of
// flash-linear-attention; rwkv_lm_x070: RWKV-LM's).
#include <memory>
#include <nlohmann/json_fwd.hpp>

#include "nn/language_model.h"
#include "nn/tensors.h"

namespace assay::exchange {

// The model that a folder's config.json describes. BadInput names each setting that
// is not understood.
nn::ModelSpec hugging_face_spec(const fs::path& folder);
// config.json as transformers reads it. BadInput, with the reason for each family, when none
// has this layout.
nlohmann::json hugging_face_config(const nn::ModelSpec& spec, const std::string& layout = "");
// The library that reads a `model_type`, by its name on the Hugging Face Hub; empty if none does.
std::string library_of(const std::string& model_type);

// Renames and lays out anything that has a model's names and shapes: weights, gradients, moments.
// Exact both ways.
nn::NamedTensors from_hugging_face(const nn::ModelSpec& spec, const nn::NamedTensors& theirs,
                                   const std::string& where, const std::string& layout = "");
nn::NamedTensors to_hugging_face(const nn::ModelSpec& spec, const nn::NamedTensors& ours,
                                 const std::string& layout = "");

// model.safetensors, or the files that model.safetensors.index.json names, by name.
std::vector<fs::path> hugging_face_weights(const fs::path& folder);
std::shared_ptr<nn::LanguageModel> read_hugging_face(const fs::path& folder);
// Writes config.json and model.safetensors. `settings` are laid over config.json (ids
// of special tokens).
void write_hugging_face(const fs::path& folder, const nn::LanguageModel& model,
                        const nlohmann::json& settings, const std::string& layout = "");

}  // namespace assay::exchange
