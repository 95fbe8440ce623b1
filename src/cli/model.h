#pragma once
// A trained model as the commands take it: where it lies, its device, its tokenizer.
#include <CLI/CLI.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/token_store.h"
#include "data/tokenizer.h"
#include "nn/language_model.h"

namespace assay::cli {

struct ModelOptions {
  std::string model;
  std::string tokenizer;
  std::string device = "auto";
  std::string precision = "fp32";
  int threads = 0;
};
void add_model_options(CLI::App& command, ModelOptions& options,
                       const std::string& name = "--model");
void add_device_options(CLI::App& command, ModelOptions& options);  // all of them but the model

struct TrainedModel {
  explicit TrainedModel(const ModelOptions& options);
  // BadInput, with the way out, when there is none
  const data::Tokenizer& need_tokenizer() const;
  // BadInput when empty or outside the vocabulary
  void check_tokens(const std::vector<int64_t>& tokens) const;
  // BadInput when the tokens of the store are those of another tokenizer, or outside the vocabulary
  void check_store(const data::TokenStore& store) const;
  std::vector<int64_t> encode(const std::string& text) const;
  at::Tensor to_device(const at::Tensor& tokens) const;
  std::string weights_hash() const;  // sha256 of the file, or of the hashes of several files

  std::shared_ptr<nn::LanguageModel> model;
  std::optional<data::Tokenizer> tokenizer;
  std::string path;
  fs::path tokenizer_file;        // empty where there is none
  std::vector<fs::path> weights;  // the files they were read from
};

}  // namespace assay::cli
