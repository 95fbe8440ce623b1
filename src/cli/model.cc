#include "cli/model.h"

#include <torch/torch.h>

#include "cli/command.h"
#include "exchange/model_files.h"
#include "train/device.h"

namespace assay::cli {

void add_model_options(CLI::App& command, ModelOptions& o, const std::string& name) {
  command
      .add_option(name, o.model,
                  "a run, a checkpoint of one, an imported model, or a Hugging Face folder")
      ->required();
  add_device_options(command, o);
}

void add_device_options(CLI::App& command, ModelOptions& o) {
  command.add_option(
      "--tokenizer", o.tokenizer,
      "SentencePiece model; default: the one that is stored with the model or its data");
  command.add_option("--device", o.device, "auto, cpu, cuda, cuda:N")->capture_default_str();
  command.add_option("--precision", o.precision, "fp32, bf16 or fp64")
      ->capture_default_str()
      ->check(CLI::IsMember({"fp32", "bf16", "fp64"}));
  command.add_option("--threads", o.threads, "CPU threads; 0: all")->check(in_range(0, 4096));
}

TrainedModel::TrainedModel(const ModelOptions& o) : path(o.model) {
  if (path.empty()) fail("the name of the model is empty; expected the folder of one");
  if (o.threads > 0) at::set_num_threads(o.threads);
  train::set_up_torch();
  const c10::Device device = train::choose_device(o.device);
  exchange::OpenModel opened = exchange::open_model(o.model);
  model = std::move(opened.model);
  weights = opened.weights;
  model->to(device, o.precision == "fp64" ? at::kDouble : at::kFloat);
  model->compute_dtype = o.precision == "bf16" ? at::kBFloat16 : at::kFloat;
  model->prepare_inference();
  tokenizer_file = o.tokenizer.empty() ? opened.tokenizer : fs::path(o.tokenizer);
  if (!tokenizer_file.empty()) tokenizer.emplace(tokenizer_file);
}

const data::Tokenizer& TrainedModel::need_tokenizer() const {
  if (!tokenizer)
    fail(
        "{}: no tokenizer is stored with this model or its data; give one with --tokenizer, "
        "or token ids",
        path);
  return *tokenizer;
}

void TrainedModel::check_tokens(const std::vector<int64_t>& tokens) const {
  if (tokens.empty()) fail("the list of tokens is empty; at least one is needed");
  const int64_t vocabulary = model->spec.config.vocab_size;
  for (const int64_t token : tokens)
    if (token < 0 || token >= vocabulary)
      fail("token {} is outside the model's vocabulary of {}", token, vocabulary);
}

void TrainedModel::check_store(const data::TokenStore& store) const {
  const int64_t vocabulary = model->spec.config.vocab_size;
  if (store.vocab_size() > vocabulary)
    fail("{}: its vocabulary of {} does not fit {}, which has {}", store.folder().string(),
         store.vocab_size(), path, vocabulary);
  if (tokenizer_file.empty() || store.tokenizer().sha256.empty()) return;
  if (sha256_of_file(tokenizer_file) != store.tokenizer().sha256)
    fail("{}: its tokens were made with another tokenizer than that of {} ({})",
         store.folder().string(), path, tokenizer_file.string());
}

std::vector<int64_t> TrainedModel::encode(const std::string& text) const {
  const std::vector<int32_t> ids = need_tokenizer().encode(text);
  return {ids.begin(), ids.end()};
}

std::string TrainedModel::weights_hash() const {
  std::string hashes;
  for (const fs::path& file : weights) hashes += sha256_of_file(file);
  return weights.size() == 1 ? hashes : sha256(hashes);
}

at::Tensor TrainedModel::to_device(const at::Tensor& tokens) const {
  return tokens.to(model->embedding.device());
}

}  // namespace assay::cli
