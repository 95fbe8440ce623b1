#include "exchange/hugging_face.h"

#include <torch/torch.h>

#include <regex>
#include <set>

#include "base/json.h"
#include "exchange/family.h"

namespace assay::exchange {

Registry<Family>& families() {
  static Registry<Family> registry("Hugging Face model_type");
  return registry;
}

void Settings::expect(const std::string& key, const std::vector<nlohmann::json>& understood) const {
  if (!has(key) || std::ranges::find(understood, values_.at(key)) != understood.end()) return;
  std::vector<std::string> words;
  for (const auto& value : understood) words.push_back(value.dump());
  fail("{}: '{}' = {} is not supported{}{}. Nothing was written.", where_, key,
       values_.at(key).dump(), words.empty() ? "" : "; expected ", join(words, " or "));
}

void Settings::expect_only(const std::vector<std::string>& understood) const {
  for (const auto& [key, value] : values_.items())
    if (!value.is_null() && std::ranges::find(understood, key) == understood.end())
      fail("{}: '{}' = {} is not supported{}. Nothing was written.", where_, key, value.dump(),
           did_you_mean(key, understood));
}

Settings Settings::child(const std::string& key) const {
  if (has(key)) check(key, values_.at(key).is_object(), "an object");
  return {has(key) ? values_.at(key) : nlohmann::json::object(), where_ + ": " + key};
}

std::pair<ConfigNode, std::string> Expanded::find(const std::string& key) const {
  const size_t dot = key.find('.');
  return dot == std::string::npos
             ? std::pair(model_, key)
             : std::pair(model_.child(key.substr(0, dot)), key.substr(dot + 1));
}

std::string Expanded::text(const std::string& key) const {
  const auto [table, name] = find(key);
  return table.value(name);
}

AttentionShape attention_shape(const Expanded& m) {
  AttentionShape shape{m.get<int64_t>("attention.num_heads"),
                       m.get<int64_t>("attention.num_kv_heads"),
                       m.get<int64_t>("attention.head_dim")};
  if (shape.heads < 1 || shape.kv_heads < 0 || shape.head_dim < 0)
    fail("model.attention: num_heads = {}, num_kv_heads = {}, head_dim = {} must be positive",
         shape.heads, shape.kv_heads, shape.head_dim);
  if (shape.kv_heads == 0) shape.kv_heads = shape.heads;
  if (shape.head_dim == 0) shape.head_dim = m.get<int64_t>("d_model") / shape.heads;
  return shape;
}

DeltaShape delta_shape(const Expanded& m) {
  const auto get = [&](const std::string& name) {
    return m.get<int64_t>("gated_delta_net." + name);
  };
  DeltaShape shape{get("num_heads"), get("num_key_heads"), get("head_dim"), get("value_head_dim")};
  if (shape.key_heads == 0) shape.key_heads = shape.heads;
  if (shape.heads < 1 || shape.key_heads < 1 || shape.heads % shape.key_heads ||
      shape.key_dim < 0 || shape.value_dim < 0)
    fail("model.gated_delta_net: num_heads = {} and num_key_heads = {} do not fit", shape.heads,
         shape.key_heads);
  if (shape.key_dim == 0) shape.key_dim = 3 * m.get<int64_t>("d_model") / 4 / shape.heads;
  if (shape.value_dim == 0) shape.value_dim = 2 * shape.key_dim;
  return shape;
}

int64_t gated_width(const Expanded& m, const std::string& channel_mixer) {
  const auto hidden = m.get<int64_t>(channel_mixer + ".d_ff");
  return hidden > 0 ? hidden : (m.get<int64_t>("d_model") * 8 / 3 + 63) / 64 * 64;
}

void add_gated_mlp(std::vector<Rule>& rules, const std::string& ours, const std::string& theirs,
                   const std::string& kind) {
  rules.push_back({ours + "channel_mixer.in_proj." + kind,
                   {{theirs + "mlp.gate_proj." + kind}, {theirs + "mlp.up_proj." + kind}}});
  rules.push_back({ours + "channel_mixer.out_proj." + kind, {{theirs + "mlp.down_proj." + kind}}});
}

namespace {

// Holds for families that do not require something else of the key.
const std::vector<Requirement> kUsual = {{"post_norm", {"[]"}},
                                         {"embedding_norm", {"false"}},
                                         {"positions", {"\"none\""}},
                                         {"embedding_scale", {"1.0"}},
                                         {"residual_scale", {"1.0"}},
                                         {"logit_divisor", {"1.0"}},
                                         {"swiglu.bias", {"false"}},
                                         {"geglu.bias", {"false"}},
                                         {"attention.window", {"-1"}},
                                         {"attention.position", {"\"rope\""}},
                                         {"attention.rotary_fraction", {"1.0"}},
                                         {"attention.gate", {"\"none\""}},
                                         {"attention.qkv_bias", {"false"}},
                                         {"attention.qk_norm", {"false"}},
                                         {"attention.qk_rmsnorm", {"\"none\""}},
                                         {"attention.softmax_scale", {"0.0"}},
                                         {"attention.constants", {"\"none\""}},
                                         {"gated_delta_net.negative_eigenvalues", {"false"}}};

// "" when the model has the family's layout, else the first reason why not.
std::string misfit(const Family& family, const Expanded& model) {
  std::vector<Requirement> all = family.requires_;
  for (const Requirement& usual : kUsual)
    if (std::ranges::find(family.requires_, usual.key, &Requirement::key) == family.requires_.end())
      all.push_back(usual);
  for (const auto& [key, accepted] : all) {
    const size_t dot = key.find('.');
    const bool applies = dot == std::string::npos || model.has(key.substr(0, dot));
    if (applies && !accepted.empty() &&
        std::ranges::find(accepted, model.text(key)) == accepted.end())
      return fmt::format("model.{} = {} must be {}", key, model.text(key), join(accepted, " or "));
  }
  try {
    family.config(model);
  } catch (const BadInput& error) {
    return error.what();
  }
  return "";
}

// Those whose layout the model has, at least one; `asked` alone when it is not empty.
std::vector<std::string> families_of(const ModelSpec& spec, const std::string& asked = "") {
  const Expanded model(spec);
  if (!asked.empty()) {
    if (const std::string reason = misfit(families().at(asked), model); !reason.empty())
      fail("the layout {} does not fit this model: {}. Nothing was written.", asked, reason);
    return {asked};
  }
  std::vector<std::string> fitting;
  std::string reasons;
  for (const std::string& name : families().names()) {
    const std::string reason = misfit(families().at(name), model);
    if (reason.empty()) fitting.push_back(name);
    reasons += fmt::format("\n  {}: {}", name, reason);
  }
  std::ranges::stable_partition(
      fitting, [](const std::string& name) { return !families().at(name).on_request; });
  if (fitting.empty())
    fail("no known Hugging Face layout fits this model:{}\nNothing was written.", reasons);
  return fitting;
}

// The first, which is written; of several, the one whose names stand in `theirs`.
const Family& family_of(const ModelSpec& spec, const NamedTensors& theirs,
                        const std::string& asked = "") {
  const auto fitting = families_of(spec, asked);
  if (fitting.size() == 1) return families().at(fitting.front());
  const auto theirs_has = [&](const std::string& name) {
    return std::ranges::any_of(theirs, [&](const auto& t) { return t.first == name; });
  };
  for (const std::string& name : fitting) {
    const Family& family = families().at(name);
    const std::string first = family.rules(Expanded(spec)).front().theirs.front().name;
    if (theirs_has(first) || theirs_has(first.substr(family.prefix.size()))) return family;
  }
  return families().at(fitting.front());
}

at::Tensor to_our_layout(const at::Tensor& theirs, Layout layout) {
  switch (layout) {
    case Layout::transposed:
      return theirs.t();
    case Layout::unsqueezed:
      return theirs.squeeze(1);
    case Layout::row:
      return theirs.unsqueeze(0);
    case Layout::flattened:
      return theirs.flatten();
    default:
      return theirs;
  }
}

at::Tensor to_their_layout(const at::Tensor& ours, Layout layout) {
  switch (layout) {
    case Layout::transposed:
      return ours.t();
    case Layout::unsqueezed:
      return ours.unsqueeze(1);
    case Layout::row:
      return ours.squeeze(0);
    case Layout::flattened:
      return ours.view({1, 1, -1});
    default:
      return ours;
  }
}

bool has_layout(const at::Tensor& theirs, Layout layout) {
  switch (layout) {
    case Layout::transposed:
      return theirs.dim() == 2;
    case Layout::unsqueezed:
      return theirs.dim() == 3 && theirs.size(1) == 1;
    case Layout::row:
      return theirs.dim() == 1;
    case Layout::flattened:
      return theirs.dim() == 3 && theirs.size(0) == 1 && theirs.size(1) == 1;
    default:
      return theirs.dim() >= 1 && theirs.dim() <= 3;
  }
}

// Their rows, group by group, to ours, section by section; and back.
at::Tensor by_section(const at::Tensor& theirs, const Part& part) {
  std::vector<at::Tensor> sections;
  for (const at::Tensor& s :
       theirs.unflatten(0, {part.groups, -1}).split_with_sizes(part.sections, 1))
    sections.push_back(s.flatten(0, 1));
  return at::cat(sections);
}
at::Tensor by_group(const at::Tensor& ours, const Part& part) {
  std::vector<at::Tensor> sections;
  int64_t begin = 0;
  for (const int64_t size : part.sections) {
    sections.push_back(ours.narrow(0, begin, size * part.groups).unflatten(0, {part.groups, size}));
    begin += size * part.groups;
  }
  return at::cat(sections, 1).flatten(0, 1);
}

int64_t total_share(const Rule& rule) {
  int64_t total = 0;
  for (const Part& part : rule.theirs) total += part.share;
  return total;
}

// The rows `rule.last` of the stack to its end, and back.
at::Tensor move_to_end(const at::Tensor& stack, const Rule& rule) {
  const int64_t unit = stack.size(0) / total_share(rule);
  const int64_t begin = rule.last.begin * unit;
  const int64_t end = begin + rule.last.count * unit;
  return at::cat({stack.slice(0, 0, begin), stack.slice(0, end), stack.slice(0, begin, end)});
}
at::Tensor move_from_end(const at::Tensor& ours, const Rule& rule) {
  const int64_t unit = ours.size(0) / total_share(rule);
  const int64_t begin = rule.last.begin * unit;
  const int64_t last = ours.size(0) - rule.last.count * unit;
  return at::cat({ours.slice(0, 0, begin), ours.slice(0, last), ours.slice(0, begin, last)});
}

// The names without what torch.compile and DistributedDataParallel put before all of them.
NamedTensors without_wrappers(NamedTensors tensors) {
  for (const std::string prefix : {"module.", "_orig_mod.", "module."})
    if (std::ranges::all_of(tensors, [&](const auto& t) { return t.first.starts_with(prefix); }))
      for (auto& [name, tensor] : tensors) name.erase(0, prefix.size());
  return tensors;
}

// Their tensors by the names of the whole model, without those that no model uses.
std::map<std::string, at::Tensor> whole_names(const Family& family, const NamedTensors& theirs,
                                              const std::string& where) {
  const bool bare = std::ranges::none_of(
      theirs, [&](const auto& t) { return t.first.starts_with(family.prefix); });
  std::map<std::string, at::Tensor> found;
  for (const auto& [name, tensor] : theirs) {
    if (std::ranges::any_of(family.left_out, [&](const std::string& ending) {
          return std::regex_search(name, std::regex("(" + ending + ")$"));
        }))
      continue;
    if (!tensor.is_floating_point())
      fail("{}: tensor '{}' holds {}, expected floating-point numbers", where, name,
           c10::toString(tensor.scalar_type()));
    std::string whole = bare && name != "lm_head.weight" ? family.prefix + name : name;
    if (constexpr std::string_view kText = "model.language_model.";
        !family.multimodal.empty() && whole.starts_with(kText))
      whole = family.prefix + whole.substr(kText.size());
    if (const auto newer = family.renamed.find(whole); newer != family.renamed.end())
      whole = newer->second;
    if (!found.emplace(whole, tensor).second) fail("{}: tensor '{}' occurs twice", where, whole);
  }
  return found;
}

std::string shape(const at::Tensor& x) { return fmt::format("[{}]", fmt::join(x.sizes(), ", ")); }

std::string names_and_shapes(const Rule& rule, const std::vector<at::Tensor>& parts) {
  std::vector<std::string> words;
  for (size_t i = 0; i < parts.size(); ++i)
    words.push_back(fmt::format("'{}' {}", rule.theirs[i].name, shape(parts[i])));
  return join(words);
}

class Taken {
 public:
  Taken(std::map<std::string, at::Tensor> tensors, std::string where)
      : tensors_(std::move(tensors)), where_(std::move(where)) {}

  at::Tensor take(const Rule& rule) {
    std::vector<at::Tensor> parts;
    int64_t rows = 0;
    for (const Part& part : rule.theirs) rows += parts.emplace_back(take(part)).size(0);
    for (size_t i = 0; i < parts.size(); ++i)
      if ((!rule.any_split &&
           parts[i].size(0) * total_share(rule) != rows * rule.theirs[i].share) ||
          parts[i].sizes().slice(1) != parts[0].sizes().slice(1))
        fail("{}: {} do not fit config.json and one another", where_,
             names_and_shapes(rule, parts));
    if (rule.last.count > 0) return move_to_end(at::cat(parts), rule);
    return parts.size() == 1 ? parts[0].contiguous() : at::cat(parts);
  }

  // A file may store an embedding and its tied head as one tensor, under either of the two names.
  void name_tied_embedding(const std::string& embedding) {
    if (tensors_.contains(embedding)) return;
    if (auto head = tensors_.extract("lm_head.weight")) {
      head.key() = embedding;
      tensors_.insert(std::move(head));
    }
  }

  // A tied head may be stored again; it must then be the embedding.
  void drop_tied_head(const at::Tensor& embedding) {
    const auto head = tensors_.find("lm_head.weight");
    if (head == tensors_.end() || taken_.contains(head->first)) return;
    if (!at::equal(head->second, embedding))
      fail(
          "{}: config.json sets tie_word_embeddings: "
          "'lm_head.weight' must equal the embedding, and it differs",
          where_);
    taken_.insert(head->first);
  }

  void expect_all_taken() const {
    for (const auto& [name, tensor] : tensors_)
      if (!taken_.contains(name))
        fail("{}: unknown tensor '{}' {}; the model of config.json has none of that name", where_,
             name, shape(tensor));
  }

 private:
  at::Tensor take(const Part& part) {
    auto found = tensors_.find(part.name);
    if (found == tensors_.end() && !part.older.empty()) found = tensors_.find(part.older);
    if (found == tensors_.end()) {
      std::vector<std::string> names;
      for (const auto& [name, tensor] : tensors_) names.push_back(name);
      fail("{}: tensor '{}' is missing{}", where_, part.name, did_you_mean(part.name, names));
    }
    const at::Tensor& x = found->second;
    int64_t rows = 0;
    for (const int64_t size : part.sections) rows += size * part.groups;
    if (!has_layout(x, part.layout) || (rows > 0 && x.size(0) != rows))
      fail("{}: tensor '{}' has the shape {}, which is not that of its family", where_, part.name,
           shape(x));
    taken_.insert(found->first);
    return part.sections.empty() ? to_our_layout(x, part.layout) : by_section(x, part);
  }

  std::map<std::string, at::Tensor> tensors_;
  std::string where_;
  std::set<std::string> taken_;
};

constexpr std::string_view kNotFinite[] = {"-Infinity", "Infinity", "NaN"};

// Python writes numbers that are not finite as bare words, which are not JSON. transformers 5
// writes {"__float__": "Infinity"} in the place of Infinity, and so does this function.
std::string without_bare_words(std::string_view text) {
  std::string out;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '"') in_string = !in_string;
    const auto word = std::ranges::find_if(
        kNotFinite, [&](std::string_view w) { return text.substr(i).starts_with(w); });
    if (!in_string && word != std::end(kNotFinite)) {
      out += fmt::format(R"({{"__float__": "{}"}})", *word);
      i += word->size() - 1;
      continue;
    }
    out += text[i];
    if (in_string && text[i] == '\\' && i + 1 < text.size()) out += text[++i];
  }
  return out;
}

nlohmann::json read_json(const fs::path& file) {
  nlohmann::json values = parse_json(without_bare_words(read_file(file)), file.string());
  if (!values.is_object()) fail("{}: is not a JSON object. Nothing was written.", file.string());
  return values;
}

std::vector<fs::path> shards(const fs::path& index) {
  std::set<fs::path> files;
  const nlohmann::json map = read_json(index).value("weight_map", nlohmann::json());
  for (const auto& [name, file] : map.items()) {
    if (!file.is_string() ||
        fs::path(file.get<std::string>()).filename() != file.get<std::string>())
      fail("{}: '{}' is in {}, which is not a file name", index.string(), name, file.dump());
    files.insert(index.parent_path() / file.get<std::string>());
  }
  return {files.begin(), files.end()};
}

NamedTensors load_weights(const fs::path& folder) {
  NamedTensors tensors;
  std::map<std::string, fs::path> files;
  for (const fs::path& file : hugging_face_weights(folder))
    for (auto& tensor : load_tensors(file)) {
      const auto [first, is_new] = files.emplace(tensor.first, file);
      if (!is_new)
        fail("{}: tensor '{}' is in {}, too", file.string(), tensor.first, first->second.string());
      tensors.push_back(std::move(tensor));
    }
  return tensors;
}

}  // namespace

std::vector<fs::path> hugging_face_weights(const fs::path& folder) {
  const fs::path whole = folder / "model.safetensors";
  const fs::path index = folder / "model.safetensors.index.json";
  if (fs::exists(whole)) return {whole};
  if (fs::exists(index)) return shards(index);
  fail(
      "{}: holds neither model.safetensors nor model.safetensors.index.json. "
      "Convert weights in PyTorch's .bin files first. "
      "Nothing was written.",
      folder.string());
}

namespace {

// Models of transformers that no layout here has, and the part that is missing.
const std::map<std::string, std::string> kMissing = {
    {"bamba", "Mamba-2 with an attention that has partial rotary positions"},
    {"deepseek_v2", "multi-head latent attention (MLA)"},
    {"deepseek_v3", "multi-head latent attention (MLA)"},
    {"falcon_h1", "attention and Mamba-2 next to each other in one layer"},
    {"gemma2", "norms before and after each part, and windows in some layers only"},
    {"gemma3_text", "norms before and after each part, and windows in some layers only"},
    {"gpt_oss", "experts"},
    {"jamba", "experts"},
    {"kimi_linear", "multi-head latent attention (MLA)"},
    {"lfm2_moe", "experts"},
    {"lfm3", "norms before and after each part, and windows in some layers only"},
    {"mixtral", "experts"},
    {"nemotron_h", "layers of one part each"},
    {"olmoe", "experts"},
    {"qwen2_moe", "experts"},
    {"qwen3_5_moe", "experts"},
    {"qwen3_5_moe_text", "experts"},
    {"qwen3_moe", "experts"},
    {"zamba2", "layers of attention that share weights"},
};

// The family of config.json and its settings of the language model, which are in text_config where
// the model has other parts.
std::pair<std::string, Settings> family_and_settings(const fs::path& folder) {
  const fs::path file = folder / "config.json";
  const Settings settings(read_json(file), file.string());
  settings.expect("quantization_config", {});
  const std::string type = settings.get<std::string>("model_type");
  for (const std::string& name : families().names())
    if (const std::string& outer = families().at(name).multimodal; !outer.empty() && outer == type)
      return {name, settings.child("text_config")};
  if (const auto missing = kMissing.find(type); missing != kMissing.end())
    fail("{}: models of type '{}' are not supported, because they have {}. Nothing was written.",
         file.string(), type, missing->second);
  families().at(type);  // throws on unknown names
  return {type, settings};
}

ModelSpec spec_of(const std::string& family, const Settings& settings, const std::string& file) {
  settings.expect("quantization_config", {});
  ConfigNode model = ConfigNode::parse("[model]\n", file).child("model");
  for (const Value& value : families().at(family).values(settings))
    model.put(value.key, value.toml, value.where.empty() ? file : value.where);
  return ModelSpec::read(model);
}

}  // namespace

ModelSpec hugging_face_spec(const fs::path& folder) {
  const auto [family, settings] = family_and_settings(folder);
  return spec_of(family, settings, (folder / "config.json").string());
}

nlohmann::json hugging_face_config(const ModelSpec& spec, const std::string& layout) {
  const std::string name = families_of(spec, layout).front();
  nlohmann::json config = families().at(name).config(Expanded(spec));
  config["model_type"] = name;
  config["vocab_size"] = spec.config.vocab_size;
  config["dtype"] = "float32";
  config["bos_token_id"] = config["eos_token_id"] = config["pad_token_id"] = nullptr;
  return config;
}

std::string library_of(const std::string& model_type) { return families().at(model_type).library; }

NamedTensors from_hugging_face(const ModelSpec& spec, const NamedTensors& stored,
                               const std::string& where, const std::string& layout) {
  const NamedTensors theirs = without_wrappers(stored);
  if (spec.config.num_layers > int64_t(theirs.size()))
    fail("{}: holds {} tensors, too few for the {} layers of config.json", where, theirs.size(),
         spec.config.num_layers);
  const Family& family = family_of(spec, theirs, layout);
  Taken tensors(whole_names(family, theirs, where), where);
  const std::vector<Rule> rules = family.rules(Expanded(spec));
  if (spec.config.tie_embeddings) tensors.name_tied_embedding(rules.front().theirs.front().name);
  NamedTensors ours;
  for (const Rule& rule : rules) ours.emplace_back(rule.ours, tensors.take(rule));
  const at::Tensor& embedding = ours.front().second;
  if (spec.config.tie_embeddings) tensors.drop_tied_head(embedding);
  tensors.expect_all_taken();
  if (embedding.sizes() != at::IntArrayRef{spec.config.vocab_size, spec.config.d_model})
    fail("{}: the embedding is [{}], but config.json asks for [{}, {}]", where,
         fmt::join(embedding.sizes(), ", "), spec.config.vocab_size, spec.config.d_model);
  return ours;
}

NamedTensors to_hugging_face(const ModelSpec& spec, const NamedTensors& ours,
                             const std::string& layout) {
  const std::map<std::string, at::Tensor> found(ours.begin(), ours.end());
  NamedTensors theirs;
  for (const Rule& rule : family_of(spec, {}, layout).rules(Expanded(spec))) {
    at::Tensor whole = found.at(rule.ours);
    if (rule.last.count > 0) whole = move_from_end(whole, rule);
    int64_t begin = 0;
    for (const Part& part : rule.theirs) {
      const int64_t rows = whole.size(0) / total_share(rule) * part.share;
      const at::Tensor ours_part = whole.narrow(0, begin, rows);
      theirs.emplace_back(part.name,
                          (part.sections.empty() ? to_their_layout(ours_part, part.layout)
                                                 : by_group(ours_part, part))
                              .contiguous());
      begin += rows;
    }
  }
  return theirs;
}

std::shared_ptr<LanguageModel> read_hugging_face(const fs::path& folder) {
  const auto [family, settings] = family_and_settings(folder);
  const ModelSpec spec = spec_of(family, settings, (folder / "config.json").string());
  const NamedTensors tensors =
      from_hugging_face(spec, load_weights(folder), folder.string(), family);
  auto model = std::make_shared<LanguageModel>(spec);
  copy_tensors(tensors, named_parameters_of(*model), folder.string());
  return model;
}

void write_hugging_face(const fs::path& folder, const LanguageModel& model,
                        const nlohmann::json& settings, const std::string& layout) {
  nlohmann::json config = hugging_face_config(model.spec, layout);
  if (!settings.is_null()) config.update(settings);
  const NamedTensors tensors = to_hugging_face(model.spec, named_parameters_of(model), layout);
  make_folder(folder);
  save_tensors(folder / "model.safetensors", tensors, {{"format", "pt"}});
  write_file(folder / "config.json", config.dump(2) + "\n");
}

}  // namespace assay::exchange
