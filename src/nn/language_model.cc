#include "nn/language_model.h"

#include <torch/torch.h>

#include <cmath>
#include <map>

#include "base/files.h"
#include "nn/initial_values.h"
#include "nn/lm_loss.h"
#include "nn/python_mixer.h"
#include "nn/recompute.h"
#include "ops/core/called.h"
#include "ops/dense/linear/linear.h"

namespace assay::nn {
namespace {

// Bounds far above any model, so that sizes can be multiplied without overflow.
constexpr int64_t kMostLayers = 10'000;
constexpr int64_t kWidest = int64_t{1} << 20;
constexpr int64_t kMostRows = int64_t{1} << 31;

void check(const ConfigNode& model, const ModelConfig& c) {
  const auto need = [&](bool good, const char* key, const std::string& expected) {
    if (!good) model.refuse(key, fmt::format("{{table}}.{} must be {}", key, expected));
  };
  const auto within = [&](int64_t value, int64_t least, int64_t most, const char* key,
                          const char* zero) {
    need(value >= least && value <= most, key, fmt::format("from 1 to {}{}", most, zero));
  };
  within(c.vocab_size, 0, kMostRows, "vocab_size", ", or 0 for that of the data");
  within(c.d_model, 1, kWidest, "d_model", "");
  within(c.num_layers, 1, kMostLayers, "num_layers", "");
  need(!c.pattern.empty(), "pattern", "a list of at least one mixer");
  need(std::ranges::find(Norm::kinds(), c.norm) != Norm::kinds().end(), "norm",
       join(Norm::kinds(), " or "));
  need(c.norm_eps > 0, "norm_eps", "positive");
  for (const auto& [scale, key] :
       {std::pair(c.embedding_scale, "embedding_scale"),
        std::pair(c.residual_scale, "residual_scale"), std::pair(c.logit_divisor, "logit_divisor")})
    need(scale > 0 && std::isfinite(scale), key, "positive");
  for (const std::string& name : c.post_norm)
    need(std::ranges::find(c.pattern, name) != c.pattern.end(), "post_norm",
         "a list of mixers of the pattern");
  need(c.embedding_std > 0, "embedding_std", "positive");
  need(c.positions == "none" || c.positions == "learned", "positions", "none or learned");
  within(c.max_positions, 0, kMostRows, "max_positions",
         ", or 0 for the sequence length of the training");
}

void check_known(const Registry<MixerEntry>& registry, const std::string& name,
                 const ConfigNode& model, const char* key) {
  try {
    registry.at(name);
  } catch (const BadInput& error) {
    model.refuse(key, error.what());
  }
}

std::vector<std::string> names_of_parts(const ModelConfig& config) {
  std::vector<std::string> parts;
  for (const std::string& name : config.pattern)
    if (std::ranges::find(parts, name) == parts.end()) parts.push_back(name);
  if (config.channel_mixer != "none") parts.push_back(config.channel_mixer);
  return parts;
}

// The name of its table in [model].
std::string table_of(const std::string& part) {
  return is_python(part) ? python_class(part) : part;
}

const MixerEntry& entry(const std::string& part) {
  return mixers().contains(part) ? mixers().at(part) : channel_mixers().at(part);
}

// The keys of the table of a Python class, as TOML. The class has its defaults in its own text.
std::string python_fields(const ConfigNode& table) {
  std::string out;
  for (const std::string& key : table.keys()) out += key + " = " + table.value(key) + "\n";
  return out;
}

// The table of a part with every default written out, and the values that are not the defaults.
std::string expanded(const std::string& part, const ConfigNode& model) {
  const ConfigNode table = model.child(table_of(part));
  return is_python(part) ? python_fields(table) : entry(part).expand(table);
}
std::string changed(const std::string& part, const ConfigNode& model) {
  const ConfigNode table = model.child(table_of(part));
  return is_python(part) ? python_fields(table) : entry(part).changed(table);
}

// A string of several lines, as TOML.
std::string lines_as_toml(const std::string& text) {
  const std::string quotes = "\"\"\"";
  std::string out = quotes + "\n";
  for (const char c : text) {
    const bool is_control = static_cast<unsigned char>(c) < ' ' && c != '\n' && c != '\t';
    if (c == '\\' || (c == '"' && out.back() == '"')) out += '\\';
    if (is_control) out += fmt::format("\\u{:04X}", int(c));
    else out += c;
  }
  return out + quotes;
}

// The code of the classes that the pattern names as python:CLASS.
struct PythonKeys {
  std::string python;         // a file, or a module that can be imported
  std::string python_source;  // PythonCode::source; read when it is empty
  void fields(auto&& field) {
    field("python", python);
    field("python_source", python_source);
  }
};

PythonCode code_of(const ConfigNode& model) {
  PythonKeys keys;
  model.read(keys, model.keys());
  return {keys.python, keys.python_source};
}

// Without the folder of the file, whose text is there. "" without Python.
std::string python_code_as_toml(const ConfigNode& model) {
  const PythonCode code = code_of(model);
  if (code.name.empty()) return "";
  std::string file = fs::path(code.name).filename();
  return to_toml({{"python", &file, ""}}) + "python_source = " + lines_as_toml(code.source) + "\n";
}

// Writes the code that is read into the table.
void read_python_code(const std::vector<std::string>& pattern, ConfigNode model) {
  const PythonCode given = code_of(model);
  const bool wanted = std::ranges::any_of(pattern, is_python);
  if (!wanted && !given.name.empty()) {
    const auto unknown = std::ranges::find_if(
        pattern, [](const std::string& part) { return !mixers().contains(part); });
    model.refuse(
        "python",
        "{table}.python is given, but no part of {table}.pattern is a python:CLASS" +
            (unknown == pattern.end() ? "" : "; did you mean \"python:" + *unknown + "\"?"));
  }
  if (!wanted) return;
  if (given.name.empty())
    model.refuse("pattern",
                 "{table}.pattern names a python:CLASS, so {table}.python must name its file, "
                 "for example python = \"my_mixer.py\"");
  try {
    const std::string source = read_python(given.name, given.source).source;
    if (given.source.empty())
      model.put("python_source", lines_as_toml(source), model.where("python"));
  } catch (const BadInput& error) {
    model.refuse("python", std::string("{table}.python: ") + error.what());
  }
}

}  // namespace

ModelSpec ModelSpec::read(const ConfigNode& model) {
  std::vector<std::string> tables = mixers().names();
  for (const std::string& name : channel_mixers().names()) tables.push_back(name);
  ModelSpec spec{{}, model};
  // The pattern first, because it names the tables of Python classes
  model.read(spec.config, model.keys());
  for (const std::string& part : spec.config.pattern)
    if (is_python(part)) tables.push_back(python_class(part));
  std::vector<std::string> keys = tables;
  if (std::ranges::any_of(spec.config.pattern, is_python) || model.has("python"))
    keys.insert(keys.end(), {"python", "python_source"});
  read_python_code(spec.config.pattern, model);
  model.read(spec.config, keys);
  check(model, spec.config);
  for (const std::string& name : spec.config.pattern)
    if (!is_python(name)) check_known(mixers(), name, model, "pattern");
  if (spec.config.channel_mixer != "none")
    check_known(channel_mixers(), spec.config.channel_mixer, model, "channel_mixer");
  const auto parts = names_of_parts(spec.config);
  for (const std::string& table : tables)
    if (model.has(table) && std::ranges::find(parts, table, table_of) == parts.end())
      model.refuse(table, fmt::format("a table for '{}', which is not a part of this model ({})",
                                      table, join(parts)));
  for (const std::string& part : parts) expanded(part, model);  // throws on unknown keys
  return spec;
}

std::string ModelSpec::toml() const {
  ModelConfig c = config;
  std::string out = "[model]\n" + to_toml(fields_of(c)) + python_code_as_toml(tables);
  for (const std::string& part : names_of_parts(config))
    out += "\n[model." + table_of(part) + "]\n" + expanded(part, tables);
  return out;
}

std::string ModelSpec::identity() const {
  ModelConfig c = config;
  std::string out = "[model]\n" + to_toml(changed_fields(c)) + python_code_as_toml(tables);
  for (const std::string& part : names_of_parts(config))
    out += "\n[model." + table_of(part) + "]\n" + changed(part, tables);
  return out;
}

Parts parts_of(ModelSpec spec) {
  ModelConfig& c = spec.config;
  c.vocab_size = 8;
  const auto period = int64_t(c.pattern.size());
  // One layer more than the pattern: the second layer of RWKV-7 also mixes the first one's values
  c.num_layers = std::min<int64_t>(c.num_layers, period + 1);
  c.max_positions = std::min<int64_t>(c.max_positions, 8);
  LanguageModel model(std::move(spec));
  Parts parts;
  for (size_t i = 0; i < model.layers.size(); ++i)
    if (const int version = model.layers[i]->mixer->numerics(); version > 1)
      parts.mixers["mixer " + model.spec.config.pattern[i % size_t(period)]] = version;
  for (const auto& layer : model.layers) leave_out_if_it_needs_a_gpu(*layer->mixer);
  const at::AutoGradMode gradients(true);
  const ops::CalledOps called;
  model.training_losses(at::zeros({1, 5}, at::kLong)).sum().backward();
  parts.operators = called.names;
  return parts;
}

int64_t ModelState::bytes() const {
  int64_t total = 0;
  for (const State& state : layers) total += state.bytes();
  return total;
}

namespace {
ModelState rows_of(const ModelState& state, const auto& rows_of_tensor) {
  ModelState out{.layers = {}, .position = state.position, .last = state.last};
  for (const State& layer : state.layers) {
    State& rows = out.layers.emplace_back();
    for (const auto& [name, tensor] : layer.tensors())
      rows[name] = tensor.dim() == 0 ? tensor : rows_of_tensor(tensor);
  }
  return out;
}
}  // namespace

ModelState select_rows(const ModelState& state, const at::Tensor& rows) {
  return rows_of(state, [&](const at::Tensor& tensor) { return tensor.index_select(0, rows); });
}

ModelState row_of(const ModelState& state, int64_t b) {
  return rows_of(state, [&](const at::Tensor& tensor) { return tensor.slice(0, b, b + 1); });
}

namespace {
// The part `name` of the model. An error about its values names the place of its table.
std::shared_ptr<Mixer> make_part(const Registry<MixerEntry>& registry, const ModelSpec& spec,
                                 const std::string& name, const Place& place) {
  try {
    if (is_python(name))
      return make_python_mixer(code_of(spec.tables), name, expanded(name, spec.tables), place);
    return registry.at(name).make(spec.tables.child(name), place);
  } catch (const ConfigError&) {
    throw;
  } catch (const BadInput& error) {
    const std::string problem = error.what();  // "attention: num_heads = 5 must …"
    const bool has_table = spec.tables.has(table_of(name));
    spec.tables.refuse(is_python(name) && !has_table ? "python" : table_of(name),
                       (problem.starts_with(name) ? "{table}." : "{table}: ") + problem);
  }
}
}  // namespace

Layer::Layer(const ModelSpec& spec, int64_t index) {
  const ModelConfig& c = spec.config;
  const auto name = [&](int64_t i) -> const std::string& {
    return c.pattern[size_t(i) % c.pattern.size()];
  };
  bool first = true;
  for (int64_t i = 0; i < index; ++i) first = first && name(i) != name(index);
  post_norm = std::ranges::find(c.post_norm, name(index)) != c.post_norm.end();
  residual_scale = c.residual_scale;
  mixer_norm = register_module("mixer_norm", std::make_shared<Norm>(c.norm, c.d_model, c.norm_eps));
  const Place place(c.d_model, index, c.num_layers, first, c.channel_mixer == "none" ? 1 : 2);
  mixer = register_module("mixer", make_part(mixers(), spec, name(index), place));
  attention = dynamic_cast<HeadwiseMixer*>(mixer.get());
  if (c.channel_mixer == "none") return;
  channel_norm =
      register_module("channel_norm", std::make_shared<Norm>(c.norm, c.d_model, c.norm_eps));
  channel_mixer =
      register_module("channel_mixer", make_part(channel_mixers(), spec, c.channel_mixer,
                                                 {c.d_model, index, c.num_layers, index == 0}));
}

at::Tensor Layer::output_of(Mixer& part, const Norm& norm, Residual& x, State& state,
                            at::ScalarType dtype) const {
  // Rows at positions of their own lie along time where they have caches.
  const auto turned = [&](const at::Tensor& h) {
    return !part.caches().empty() && !state.context.rows.empty() ? h.transpose(0, 1) : h;
  };
  const auto read = [&](const at::Tensor& h) { return turned(part.forward(turned(h), state)); };
  at::Tensor y;
  auto* projected = dynamic_cast<ProjectedMixer*>(&part);
  if (post_norm) {
    x = {x.sum(), {}};
    y = norm.forward(read(x.x.to(dtype)));
  } else if (projected && x.x.size(1) == 1 && !x.x.requires_grad()) {
    const at::Tensor h = norm.forward_projected(x, projected->input_projection(), dtype);
    y = turned(projected->mix(turned(h), state));
  } else {
    y = read(norm.forward(x).to(dtype));
  }
  return residual_scale == 1 ? y : y * residual_scale;
}

Residual Layer::forward(Residual x, State& state, at::ScalarType dtype) {
  x.y = output_of(*mixer, *mixer_norm, x, state, dtype);
  if (channel_mixer) x.y = output_of(*channel_mixer, *channel_norm, x, state, dtype);
  return x;
}

HeadwiseMixer::HeadInputs Layer::head_inputs(const at::Tensor& x, State& state,
                                             at::ScalarType dtype) {
  const at::Tensor h = (post_norm ? x : mixer_norm->forward(x)).to(dtype);
  return attention->head_inputs(h, state.advance(x.size(1)), state);
}

at::Tensor Layer::after_attention(const at::Tensor& x, const at::Tensor& attended,
                                  const at::Tensor& gate, State& state, at::ScalarType dtype) {
  at::Tensor y = attention->output(attended, gate);
  if (post_norm) y = mixer_norm->forward(y);
  Residual sum{x, residual_scale == 1 ? y : y * residual_scale};
  if (channel_mixer) sum.y = output_of(*channel_mixer, *channel_norm, sum, state, dtype);
  return sum.sum();
}

at::Tensor Layer::forward(const at::Tensor& x, State& state, at::ScalarType dtype) {
  return forward(Residual{x, {}}, state, dtype).sum();
}

LanguageModel::LanguageModel(ModelSpec s) : spec(std::move(s)) {
  const ModelConfig& c = spec.config;
  if (c.vocab_size < 1) fail("model.vocab_size = {} must be positive", c.vocab_size);
  if (c.positions == "learned" && c.max_positions < 1)
    fail("model.positions = learned needs model.max_positions");
  embedding = add_parameter("embedding", torch::zeros({c.vocab_size, c.d_model}),
                            {.start = normal(c.embedding_std), .weight_decay = true});
  if (c.positions == "learned")
    positions = add_parameter("positions", torch::zeros({c.max_positions, c.d_model}),
                              {.start = normal(kMatrixDeviation), .weight_decay = true});
  for (int64_t i = 0; i < c.num_layers; ++i)
    layers.push_back(
        register_module("layers_" + std::to_string(i), std::make_shared<Layer>(spec, i)));
  if (c.embedding_norm)
    embedding_norm =
        register_module("embedding_norm", std::make_shared<Norm>(c.norm, c.d_model, c.norm_eps));
  norm = register_module("norm", std::make_shared<Norm>(c.norm, c.d_model, c.norm_eps));
  if (!c.tie_embeddings) head = add_linear("head", c.d_model, c.vocab_size);
  start_outputs(*this, c.num_layers);
}

const at::Tensor& LanguageModel::head_weight() const {
  if (head) return head->weight;
  return converted_head_.defined() ? converted_head_ : embedding;
}

void LanguageModel::prepare_inference() {
  if (compute_dtype == at::kFloat) return;  // that of the weights
  const at::NoGradGuard no_grad;
  for (const auto& module : modules(/*include_self=*/false))
    if (auto* linear = module->as<Linear>()) {
      linear->weight.set_data(linear->weight.to(compute_dtype));
      if (linear->bias.defined()) linear->bias.set_data(linear->bias.to(compute_dtype));
    }
  if (!head) converted_head_ = embedding.to(compute_dtype);
}

at::Tensor LanguageModel::embed(const at::Tensor& tokens, const ModelState& state) const {
  const int64_t time = tokens.size(1);
  // The rows of the converted table have the bits of converted rows.
  const bool converted =
      converted_head_.defined() && !positions.defined() && !spec.config.residual_in_fp32;
  at::Tensor x = at::embedding(converted ? converted_head_ : embedding, tokens);
  if (positions.defined() && !state.rows.empty()) {
    x = x + positions.index_select(0, state.rows.index(x.device())).unsqueeze(1);
  } else if (positions.defined()) {
    if (state.position + time > positions.size(0))
      fail("position {} is beyond model.max_positions = {}", state.position + time,
           positions.size(0));
    x = x + positions.slice(0, state.position, state.position + time);
  }
  x = x.to(spec.config.residual_in_fp32 ? at::promote_types(product_dtype(), at::kFloat)
                                        : product_dtype());
  if (spec.config.embedding_scale != 1) x = x * spec.config.embedding_scale;
  return embedding_norm ? embedding_norm->forward(x) : x;
}

at::ScalarType LanguageModel::product_dtype() const {
  return compute_dtype == at::kFloat ? embedding.scalar_type() : compute_dtype;
}

at::Tensor LanguageModel::normalised(Residual output) const {
  const at::Tensor normed = norm->forward(output).to(product_dtype());
  return spec.config.logit_divisor == 1 ? normed : normed / spec.config.logit_divisor;
}

at::Tensor LanguageModel::hidden(const at::Tensor& tokens, ModelState& state) {
  return normalised(residual(tokens, state));
}

Residual LanguageModel::residual(const at::Tensor& tokens, ModelState& state) {
  const int64_t time = tokens.size(1);
  state.layers.resize(layers.size());
  if (before) before(-1);
  Residual x{embed(tokens, state), {}};
  if (watch) watch(-1, x.x);
  Context context{.last = state.last, .rows = state.rows};
  if (state.auxiliary_loss.defined())
    context.handed[Context::kAuxiliaryLoss] = state.auxiliary_loss;
  for (size_t i = 0; i < layers.size(); ++i) {
    if (before) before(int64_t(i));
    const auto run = [layer = layers[i], dtype = product_dtype()](const Residual& input,
                                                                  State& state, Context& context) {
      std::swap(state.context, context);
      Residual output = layer->forward(input, state, dtype);
      std::swap(state.context, context);
      return output;
    };
    if (recompute_activations && at::GradMode::is_enabled())
      x = {recomputed(
               [run](const at::Tensor& input, Handed& handed) {
                 State fresh;
                 Context alone{.handed = std::move(handed), .last = true};
                 const at::Tensor output = run({input, {}}, fresh, alone).sum();
                 handed = std::move(alone.handed);
                 return output;
               },
               x.sum(), context.handed),
           {}};
    else x = run(x, state.layers[i], context);
    if (watch) {
      x = {x.sum(), {}};
      watch(int64_t(i), x.x);
    }
  }
  if (before) before(int64_t(layers.size()));
  if (state.auxiliary_loss.defined())
    state.auxiliary_loss = context.handed.at(Context::kAuxiliaryLoss);
  state.position += time;
  state.rows.advance(time);
  return x;
}

int64_t LanguageModel::max_time() const {
  int64_t time = positions.defined() ? positions.size(0) : INT64_MAX;
  for (const auto& layer : layers) time = std::min(time, layer->mixer->max_time());
  return time;
}

at::Tensor LanguageModel::logits(const at::Tensor& tokens, ModelState& state) {
  if (at::GradMode::is_enabled() || spec.config.logit_divisor != 1)
    return logits_of_hidden(hidden(tokens, state));
  Residual x = residual(tokens, state);
  return norm->forward_projected(x, {head_weight()}, product_dtype()).contiguous();
}

at::Tensor LanguageModel::logits_of_hidden(const at::Tensor& hidden) const {
  const at::Tensor weight = head_weight().to(hidden.scalar_type());
  return ops::linear(hidden, weight, {}, weight.is_same(head_weight())).contiguous();
}

at::Tensor LanguageModel::loss(const at::Tensor& tokens) {
  ModelState state{.last = true};
  const at::Tensor h = hidden(tokens.slice(1, 0, -1), state);
  return loss_of_hidden(h, tokens.slice(1, 1));
}

at::Tensor LanguageModel::training_losses(const at::Tensor& tokens) {
  ModelState state{.last = true, .auxiliary_loss = no_auxiliary_loss()};
  const at::Tensor h = hidden(tokens.slice(1, 0, -1), state);
  std::vector<at::Tensor> losses = {loss_of_hidden(h, tokens.slice(1, 1))};
  if (state.auxiliary_loss.defined()) losses.push_back(state.auxiliary_loss.to(losses[0]));
  return at::stack(losses);
}

at::Tensor LanguageModel::no_auxiliary_loss() const {
  const auto has_one = [](const auto& layer) {
    return layer->mixer->has_auxiliary_loss() ||
           (layer->channel_mixer && layer->channel_mixer->has_auxiliary_loss());
  };
  if (std::ranges::none_of(layers, has_one)) return {};
  return at::zeros({}, embedding.options().dtype(at::promote_types(product_dtype(), at::kFloat)));
}

at::Tensor LanguageModel::loss_of_hidden(const at::Tensor& hidden,
                                         const at::Tensor& targets) const {
  return lm_loss(hidden.flatten(0, 1), head_weight(), targets.flatten());
}

at::Tensor LanguageModel::token_losses(const at::Tensor& tokens) {
  const at::NoGradGuard no_grad;
  ModelState state{.last = true};
  const at::Tensor h = hidden(tokens.slice(1, 0, -1), state);
  return score_tokens(h.flatten(0, 1), head_weight(), tokens.slice(1, 1).flatten())
      .losses.view({tokens.size(0), -1});
}

double LanguageModel::forward_flops(int64_t time) {
  double flops = 2.0 * double(head_weight().numel());
  for (const auto& layer : layers) {
    for (const Linear* linear : linears_of(*layer)) flops += 2.0 * double(linear->weight.numel());
    flops += layer->mixer->mixing_flops(time);
  }
  return flops;
}

int64_t LanguageModel::parameter_count() {
  int64_t count = 0;
  for (const at::Tensor& parameter : parameters()) count += parameter.numel();
  return count;
}

int64_t LanguageModel::state_bytes(int64_t time) {
  const at::NoGradGuard no_grad;
  const auto bytes = [&](int64_t length) {
    int64_t total = 0;
    Context context;
    std::map<std::string, int64_t> known;  // layers of one mixer are configured alike
    const at::Tensor x =
        at::zeros({1, length, spec.config.d_model}, embedding.options().dtype(product_dtype()));
    for (size_t i = 0; i < layers.size(); ++i) {
      const auto [entry, fresh] =
          known.emplace(spec.config.pattern[i % spec.config.pattern.size()], 0);
      if (fresh) {
        State state;
        std::swap(state.context, context);
        layers[i]->mixer->forward(x, state);
        // One size
        if (layers[i]->channel_mixer) layers[i]->channel_mixer->forward(x.slice(1, 0, 1), state);
        std::swap(state.context, context);
        entry->second = state.bytes();
      }
      total += entry->second;
    }
    return total;
  };
  // no window below `time` fills after `filled`
  int64_t longest = INT64_MAX;
  int64_t filled = 0;
  for (const auto& layer : layers) {
    longest = std::min(longest, layer->mixer->max_time());
    if (layer->mixer->window() < time) filled = std::max(filled, layer->mixer->window());
  }
  const int64_t period = std::min<int64_t>(1024, longest / 3);  // a multiple of usual chunk sizes
  if (period < 1) return bytes(std::min<int64_t>(time, 1));
  const int64_t start = std::max(period, std::min(filled, longest - 2 * period));
  if (time <= start + period) return bytes(time);
  const int64_t first = start + (time - start) % period;
  const int64_t before = bytes(first);
  return before + (bytes(first + period) - before) * ((time - first) / period);
}

}  // namespace assay::nn
