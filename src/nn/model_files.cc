#include "nn/model_files.h"

#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>

#include "nn/hugging_face/hugging_face.h"

namespace assay::nn {
namespace {

OpenModel read_model(const fs::path& config, const fs::path& weights) {
  const NamedTensors tensors = load_tensors(weights);
  auto model = std::make_shared<LanguageModel>(
      ModelSpec::read(ConfigNode::read_file(config).child("model")));
  copy_tensors(tensors, named_parameters_of(*model), weights.string());
  return {std::move(model), weights, {}};
}

// Beside the model, or in the store that the run was trained on.
fs::path find_tokenizer(const fs::path& folder) {
  if (fs::exists(folder / "tokenizer.model")) return folder / "tokenizer.model";
  if (!fs::exists(folder / "run.json")) return {};
  const auto run =
      nlohmann::json::parse(read_file(folder / "run.json"), nullptr, /*allow_exceptions=*/false);
  if (!run.is_object() || !run.contains("data_folder") || !run["data_folder"].is_string())
    return {};
  const fs::path store = run["data_folder"].get<std::string>();
  return fs::exists(store / "tokenizer.model") ? store / "tokenizer.model" : fs::path();
}

void write_new(fs::path folder, const fs::path& tokenizer,
               const std::function<void(const fs::path&)>& write) {
  if (folder.filename().empty()) folder = folder.parent_path();  // "out/"
  if (fs::exists(folder))
    fail("{}: is there already; choose another folder. Nothing was written.", folder.string());
  const TemporaryFolder temporary(folder);
  write(temporary.path());
  if (!tokenizer.empty()) write_file(temporary.path() / "tokenizer.model", read_file(tokenizer));
  publish_folder(temporary.path(), folder);
}

}  // namespace

std::map<int64_t, fs::path> checkpoints(const fs::path& run) {
  std::map<int64_t, fs::path> found;
  if (!fs::is_directory(run / "checkpoints")) return found;
  for (const auto& entry : fs::directory_iterator(run / "checkpoints")) {
    const std::string name = entry.path().filename();
    if (name.starts_with("step-") && name.size() > 5 && name.size() < 24 &&
        std::all_of(name.begin() + 5, name.end(), isdigit))
      found[std::stoll(name.substr(5))] = entry.path();
  }
  return found;
}

OpenModel open_model(const fs::path& path) {
  const auto open = [](const fs::path& home, const fs::path& weights) {
    OpenModel opened = read_model(home / "config.toml", weights);
    opened.tokenizer = find_tokenizer(home);
    return opened;
  };
  const auto found = checkpoints(path);
  if (!found.empty()) return open(path, found.rbegin()->second / "model.safetensors");
  if (fs::exists(path / "config.toml") && fs::exists(path / "model.safetensors"))
    return open(path, path / "model.safetensors");
  if (fs::exists(path / "config.json"))
    return {read_hugging_face(path), path / "model.safetensors", find_tokenizer(path)};
  const fs::path run = fs::absolute(path / "").parent_path().parent_path().parent_path();
  if (fs::exists(path / "model.safetensors") && fs::exists(run / "config.toml"))
    return open(run, path / "model.safetensors");
  if (fs::exists(path / "config.toml"))
    fail("{}: a run without a checkpoint; train it first", path.string());
  if (!fs::exists(path)) fail("{}: no such model", path.string());
  fail(
      "{}: is no model. Expected a run (config.toml, checkpoints/), a checkpoint of one, "
      "an imported model "
      "(config.toml, "
      "model.safetensors) or a Hugging Face folder (config.json, model.safetensors)",
      path.string());
}

void save_model(const fs::path& folder, const OpenModel& opened) {
  write_new(folder, opened.tokenizer, [&](const fs::path& to) {
    write_file(to / "config.toml", opened.model->spec.toml());
    save_tensors(to / "model.safetensors", named_parameters_of(*opened.model));
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

}  // namespace assay::nn
