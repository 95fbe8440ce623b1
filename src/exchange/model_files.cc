#include "exchange/model_files.h"

#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>

#include "exchange/hugging_face.h"
#include "run/folder.h"

namespace assay::exchange {

using namespace nn;

namespace {

// BadInput if a value is NaN or infinite: every result would be so, too.
void check_finite(const fs::path& path, const nn::LanguageModel& model) {
  for (const auto& [name, tensor] : named_parameters_of(model)) {
    if (tensor.numel() == 0) continue;
    const auto [least, most] = at::aminmax(tensor.detach());
    if (!std::isfinite(least.item<double>()) || !std::isfinite(most.item<double>()))
      fail("{}: the tensor '{}' holds values that are NaN or infinite ({} of {})", path.string(),
           name, tensor.numel() - at::isfinite(tensor).sum().item<int64_t>(), tensor.numel());
  }
}

OpenModel read_model(const fs::path& config, const fs::path& weights) {
  const NamedTensors tensors = load_tensors(weights);
  auto model = std::make_shared<LanguageModel>(
      ModelSpec::read(ConfigNode::read_file(config).child("model")));
  copy_tensors(tensors, named_parameters_of(*model), weights.string());
  return {std::move(model), {weights}, {}};
}

// Next to the model, or in the store that the run was trained on.
fs::path find_tokenizer(const fs::path& folder) {
  const auto in = [](const fs::path& place) {
    for (const char* name : {"tokenizer.model", "tokenizer.json"})
      if (const fs::path file = place / name; fs::exists(file)) return file;
    return fs::path();
  };
  if (const fs::path file = in(folder); !file.empty()) return file;
  const auto provenance = run::Folder{folder}.provenance();
  return provenance.exists() ? in(provenance.read().data_folder.value_or("")) : fs::path();
}

void write_new(fs::path folder, const fs::path& tokenizer,
               const std::function<void(const fs::path&)>& write) {
  if (folder.filename().empty()) folder = folder.parent_path();  // "out/"
  if (fs::exists(folder))
    fail("{}: exists already; choose another folder. Nothing was written.", folder.string());
  const TemporaryFolder temporary(folder);
  write(temporary.path());
  if (!tokenizer.empty()) {
    const std::string contents = read_file(tokenizer);
    const char* name = contents.starts_with('{') ? "tokenizer.json" : "tokenizer.model";
    write_file(temporary.path() / name, contents);
  }
  publish_folder(temporary.path(), folder);
}

}  // namespace

namespace {

OpenModel open_unchecked(const fs::path& path) {
  const auto open = [](const run::Folder& home, const run::Checkpoint& weights) {
    weights.check_weights();
    OpenModel opened = read_model(home.config(), weights.weights());
    opened.tokenizer = find_tokenizer(home.path);
    return opened;
  };
  const run::Folder folder{path};
  // An imported model is laid out like a run and a checkpoint in one
  const run::Checkpoint here{path};
  const auto found = folder.checkpoints();
  if (!found.empty()) return open(folder, found.rbegin()->second);
  const bool has_config = fs::exists(folder.config());
  const bool has_weights = fs::exists(here.weights());
  if (has_config && has_weights) return open(folder, here);
  if (fs::exists(path / "config.json"))
    return {read_hugging_face(path), hugging_face_weights(path), find_tokenizer(path)};
  if (has_config) fail("{}: a run without a checkpoint; train it first", path.string());
  if (const auto run = run::enclosing_run(path); run && has_weights) return open(*run, here);
  if (!fs::exists(path)) fail("{}: no such model", path.string());
  fail(
      "{}: not a model. Expected a run (config.toml, checkpoints/), a checkpoint of one, "
      "an imported model (config.toml, model.safetensors) or a Hugging Face folder (config.json, "
      "model.safetensors)",
      path.string());
}

}  // namespace

OpenModel open_model(const fs::path& path) {
  OpenModel opened = open_unchecked(path);
  check_finite(path, *opened.model);
  return opened;
}

void save_model(const fs::path& folder, const OpenModel& opened) {
  write_new(folder, opened.tokenizer, [&](const fs::path& to) {
    write_file(run::Folder{to}.config(), opened.model->spec.toml());
    save_tensors(run::Checkpoint{to}.weights(), named_parameters_of(*opened.model));
  });
}

void export_model(const fs::path& folder, const OpenModel& opened, const nlohmann::json& settings,
                  const std::string& layout, const std::map<std::string, std::string>& files) {
  hugging_face_config(opened.model->spec, layout);  // refuses before anything is written
  write_new(folder, opened.tokenizer, [&](const fs::path& to) {
    write_hugging_face(to, *opened.model, settings, layout);
    for (const auto& [name, contents] : files) write_file(to / name, contents);
  });
}

}  // namespace assay::exchange
