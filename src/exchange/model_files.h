#pragma once
// Trained models on disk, whatever wrote them.
#include <memory>
#include <nlohmann/json_fwd.hpp>

#include "nn/language_model.h"
#include "nn/tensors.h"

namespace assay::exchange {

struct OpenModel {
  std::shared_ptr<nn::LanguageModel> model;  // on the CPU, in fp32
  std::vector<fs::path> weights;             // the files they were read from
  // The SentencePiece model that belongs to it; empty when none is found
  fs::path tokenizer;
};
// `path`: a run (its newest checkpoint), RUN/checkpoints/step-N, an imported model, or a Hugging
// Face folder. BadInput says what was looked for, and which file is damaged or which tensor is not
// finite.
OpenModel open_model(const fs::path& path);

// Writes an imported model, {config.toml, model.safetensors, tokenizer.model if there is one}, or a
// Hugging Face folder, {config.json, model.safetensors, tokenizer.model} and `files` (name:
// contents). The folder appears whole; BadInput if it exists.
void save_model(const fs::path& folder, const OpenModel& model);
void export_model(const fs::path& folder, const OpenModel& model, const nlohmann::json& settings,
                  const std::string& layout = "",
                  const std::map<std::string, std::string>& files = {});

}  // namespace assay::exchange
