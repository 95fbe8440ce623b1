#include "nn/saved_state.h"

#include <torch/torch.h>

#include <map>
#include <span>

#include "nn/tensors.h"

namespace assay::nn {
namespace {

// SHA-256 of the configuration and of the first 256 values of every weight; training changes these.
std::string fingerprint(const LanguageModel& model) {
  std::string text = model.spec.toml();
  for (const auto& [name, weight] : named_parameters_of(model)) {
    const at::Tensor begin =
        weight.detach().flatten().slice(0, 0, 256).to(at::kCPU, at::kFloat).contiguous();
    text += name + std::string(static_cast<const char*>(begin.data_ptr()), size_t(begin.nbytes()));
  }
  return sha256(text);
}

// SHA-256 of the position and of every tensor's name, dtype, shape and values: shows any change.
std::string digest(const NamedTensors& tensors, const std::string& position) {
  std::map<std::string, std::string> lines;
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor host = tensor.detach().cpu().contiguous();
    const auto* data = static_cast<const std::byte*>(host.data_ptr());
    lines[name] =
        fmt::format("{} {} [{}] {}\n", name, c10::toString(host.scalar_type()),
                    fmt::join(host.sizes(), ", "), sha256(std::span(data, host.nbytes())));
  }
  std::string text = "position " + position + "\n";
  for (const auto& [name, line] : lines) text += line;
  return sha256(text);
}

// Integers count positions and lie on the CPU; the rest has the batch in front.
at::Tensor placed(const at::Tensor& t, const LanguageModel& model, int64_t batch) {
  if (t.dim() == 0) return t;
  std::vector<int64_t> shape = t.sizes().vec();
  shape[0] = batch;
  return t.expand(shape).to(model.embedding.device()).contiguous();
}

}  // namespace

void save_generation(const fs::path& file, const LanguageModel& model,
                     const Generation& generation) {
  NamedTensors tensors = {{"tokens", at::tensor(generation.tokens, at::kLong)}};
  for (size_t i = 0; i < generation.state.layers.size(); ++i)
    for (const auto& [name, tensor] : generation.state.layers[i].tensors())
      tensors.emplace_back(fmt::format("layers.{}.{}", i, name), tensor);
  const std::string position = std::to_string(generation.state.position);
  save_tensors(file, tensors,
               {{"model", fingerprint(model)},
                {"dtype", c10::toString(model.compute_dtype)},
                {"position", position},
                {"sha256", digest(tensors, position)}});
}

Generation load_generation(const fs::path& file, const LanguageModel& model, int64_t batch) try {
  const Safetensors in(file);
  const auto& said = in.metadata();
  for (const char* key : {"model", "dtype", "position", "sha256"})
    if (!in.has("tokens") || !said.contains(key))
      fail("{}: not a saved generation of this version of Assay", file.string());
  if (said.at("dtype") != c10::toString(model.compute_dtype))
    fail("{}: saved by a model that computed in {}, not in {}", file.string(), said.at("dtype"),
         c10::toString(model.compute_dtype));
  if (said.at("model") != fingerprint(model))
    fail("{}: saved from another model, or from other weights of it", file.string());
  if (said.at("sha256") != digest(load_tensors(file), said.at("position")))
    fail("{}: changed since it was saved; save the generation again", file.string());
  const auto tokens = in.values<int64_t>("tokens");
  Generation out{{tokens.begin(), tokens.end()}, {}};
  out.state.position = std::stoll(said.at("position"));
  if (out.state.position > 0) out.state.layers.resize(size_t(model.spec.config.num_layers));
  for (const TensorEntry& entry : in.tensors()) {
    if (entry.name == "tokens") continue;
    const size_t dot = entry.name.find('.', 7);
    out.state.layers.at(std::stoul(entry.name.substr(7)))[entry.name.substr(dot + 1)] =
        placed(to_tensor(entry), model, batch);
  }
  if (out.state.position < 0 || out.state.position >= int64_t(out.tokens.size()))
    fail("{}: says that {} of its {} tokens were read", file.string(), out.state.position,
         out.tokens.size());
  return out;
} catch (const std::logic_error&) {  // a name without a layer, a position that is no number
  fail("{}: not a saved generation", file.string());
}

}  // namespace assay::nn
