// assay list KIND, assay describe KIND NAME
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "cli/command.h"
#include "cli/task_files.h"
#include "nn/language_model.h"
#include "nn/mixer.h"
#include "ops/core/paths.h"
#include "study/plan.h"
#include "tasks/kind.h"
#include "tasks/task.h"
#include "train/config.h"

namespace assay::cli {
namespace {

using Json = nlohmann::json;

// Names, each with a line about it.
using Listed = std::vector<std::pair<std::string, std::string>>;

std::vector<std::string> names_of(const Listed& listed) {
  std::vector<std::string> names;
  for (const auto& [name, about] : listed) names.push_back(name);
  return names;
}

Listed files(const std::vector<std::string>& names, fs::path (*file_of)(const std::string&)) {
  Listed listed;
  for (const std::string& name : names)
    listed.emplace_back(name, study::opening_sentence(read_file(file_of(name))));
  return listed;
}

// A copy of the program without its folder plans/ has neither presets nor plans.
void check_found(const std::vector<std::string>& names, const std::string& what) {
  if (!names.empty()) return;
  std::vector<std::string> folders;
  for (const fs::path& folder : study::plan_folders())
    if (const std::string path = fs::absolute(folder).lexically_normal().string();
        !std::ranges::count(folders, path))
      folders.push_back(path);
  fail<Error>("no {} were found\n  Folders searched: {}. Copy plans/ of Assay to one of them.",
              what, join(folders));
}

Listed models() {
  const std::vector<std::string> names = study::names_of_plans("models");
  check_found(names, "presets");
  return files(names, [](const std::string& name) { return study::preset_file(name); });
}

Listed plans() {
  std::vector<std::string> names = study::names_of_plans("");
  check_found(names, "plans");
  for (const std::string& name : study::names_of_plans("ablations"))
    names.push_back("ablations/" + name);
  return files(names, [](const std::string& name) { return study::plan_file(name); });
}

tasks::Task read_task(const std::string& name) {
  if (!name.ends_with(".toml")) check_found(study::names_of_plans("tasks"), "tasks");
  return tasks::Task::read(tasks::find_task(name, task_folders()));
}

Listed all_tasks() {
  const std::vector<std::string> names = study::names_of_plans("tasks");
  check_found(names, "tasks");
  return files(names, [](const std::string& name) { return study::plan_file("tasks/" + name); });
}

// The documents that tasks read from the folder of --data, each with these tasks.
std::map<std::string, std::vector<std::string>> tasks_by_dataset() {
  std::map<std::string, std::vector<std::string>> found;
  for (const auto& [name, about] : all_tasks()) {
    const tasks::TaskConfig config = read_task(name).config;
    for (const std::string& documents : {config.documents, config.few_shot_documents})
      if (!documents.empty()) found[documents].push_back(name);
  }
  return found;
}

Listed datasets() {
  Listed listed;
  check_found(study::names_of_plans("tasks"), "datasets");
  for (const auto& [name, users] : tasks_by_dataset()) listed.emplace_back(name, join(users));
  return listed;
}

Listed parts(const Registry<nn::MixerEntry>& registry) {
  Listed listed;
  for (const std::string& name : registry.names())
    listed.emplace_back(name, registry.at(name).about);
  return listed;
}

Listed operators() {
  Listed listed;
  for (const ops::OperatorInfo& op : ops::public_operators())
    listed.emplace_back(op.name, op.about);
  return listed;
}

Listed listed(const std::string& kind) {
  if (kind == "mixers") return parts(nn::mixers());
  if (kind == "channel_mixers") return parts(nn::channel_mixers());
  if (kind == "ops") return operators();
  if (kind == "models") return models();
  if (kind == "plans") return plans();
  if (kind == "tasks") return all_tasks();
  if (kind == "datasets") return datasets();
  const std::vector<std::string> kinds = {"mixers", "channel_mixers", "ops",     "models",
                                          "plans",  "tasks",          "datasets"};
  if (kind.empty()) fail("list takes a kind: {}", join(kinds));
  fail("unknown kind '{}'{}\n  Kinds: {}.", kind, did_you_mean(kind, kinds), join(kinds));
}

void list(const std::string& kind) {
  const Listed found = listed(kind);
  const std::vector<std::string> names = names_of(found);
  const size_t width = std::ranges::max(names, {}, &std::string::size).size();
  std::string text;
  for (const auto& [name, about] : found) text += fmt::format("{:<{}}  {}\n", name, width, about);
  print(names, text);
}

// The shapes of weights and of states that follow from the fields, such as the width of a head, of
// each mixer that the model has. Read from layers that are built, and from a run of one token.
Json derived_shapes(nn::ModelSpec spec) {
  nn::ModelConfig& config = spec.config;
  config.vocab_size = 1;
  config.max_positions = 1;
  // The first layer of a pattern may lack parts of the later ones.
  config.num_layers = std::min(config.num_layers, int64_t(config.pattern.size()) + 1);
  nn::LanguageModel model(spec);
  const at::NoGradGuard no_grad;
  nn::ModelState state;
  model.hidden(at::zeros({1, 1}, at::kLong), state);
  Json parts = Json::array();
  for (size_t i = 0; i < model.layers.size(); ++i) {
    Json weights = Json::object();
    Json states = Json::object();
    for (const auto& parameter : model.layers[i]->named_parameters())
      weights[parameter.key()] = parameter.value().sizes().vec();
    for (const auto& [key, tensor] : state.layers[i].tensors()) states[key] = tensor.sizes().vec();
    const std::string& mixer = config.pattern[i % config.pattern.size()];
    const Json part = {{"mixer", mixer}, {"layer", i}, {"weights", weights}, {"state", states}};
    const auto alike = [&](const Json& other) {
      return other["mixer"] == mixer && other["weights"] == weights && other["state"] == states;
    };
    if (std::ranges::none_of(parts, alike)) parts.push_back(part);
  }
  return parts;
}

// A preset with every default written out, its comment, and what follows from the fields. The text
// is TOML.
void describe_model(const std::string& name) {
  const fs::path file = study::preset_file(name);
  const std::vector<std::string> comment = study::first_comment(read_file(file));
  const nn::ModelSpec spec = nn::ModelSpec::read(ConfigNode::read_file(file).child("model"));
  const Json parts = derived_shapes(spec);
  std::string text = fmt::format("# {}\n{}", join(comment, "\n# "), spec.toml());
  for (const Json& part : parts) {
    text += fmt::format("\n# Shapes in layer {} ({}):\n", part["layer"].get<int64_t>(),
                        part["mixer"].get<std::string>());
    for (const auto& [key, shape] : part["weights"].items())
      text += fmt::format("#   {:<40} {}\n", key, shape.dump());
    for (const auto& [key, shape] : part["state"].items())
      text += fmt::format("#   {:<40} {}\n", "state after one token: " + key, shape.dump());
  }
  print({{"kind", "model"},
         {"name", name},
         {"about", join(comment, "\n")},
         {"toml", spec.toml()},
         {"shapes", parts}},
        text);
}

void describe_operator(const std::string& name) {
  const std::vector<ops::OperatorInfo> all = ops::public_operators();
  const auto op = std::ranges::find(all, name, &ops::OperatorInfo::name);
  if (op == all.end()) fail("unknown op '{}'{}", name, did_you_mean(name, names_of(operators())));
  Json paths = Json::array();
  std::string text = fmt::format("op {}: {}\n  torch.ops.assay.{}\n", name, op->about, op->schema);
  for (const ops::OpPath& path : ops::op_paths()) {
    if (path.op != name) continue;
    paths.push_back({{"device", path.device}, {"path", path.path}, {"numerics", path.numerics}});
    text += fmt::format("  {:<5} {}\n", path.device, path.path);
  }
  const Json document = {{"kind", "op"},
                         {"name", name},
                         {"about", op->about},
                         {"schema", op->schema},
                         {"paths", paths}};
  print(document, text);
}

void describe_plan(const std::string& name) {
  const fs::path file = study::plan_file(name);
  const study::Plan plan = study::read_plan(file);
  std::vector<std::string> models;
  std::vector<std::string> settings;
  for (const study::Model& model : plan.models) models.push_back(model.name);
  for (const study::Setting& setting : plan.settings)
    if (!setting.name.empty()) settings.push_back(setting.name);
  const std::vector<std::string> comment = study::first_comment(read_file(file));
  const study::DataSetting& data = plan.settings.front().data;
  std::string text = fmt::format("plan {} ({})\n  {}\n\n", name, file.lexically_normal().string(),
                                 join(comment, "\n  "));
  text += fmt::format("  reference      {}\n  models         {}\n", plan.reference, join(models));
  if (!settings.empty()) text += fmt::format("  settings       {}\n", join(settings));
  text += fmt::format(
      "  trained on     {}\n  out of domain  {}\n", join(data.train),
      data.out_of_domain.empty() ? "none (mixed-domain setting)" : join(data.out_of_domain));
  print({{"kind", "plan"},
         {"name", name},
         {"file", file.string()},
         {"about", join(comment, "\n")},
         {"reference", plan.reference},
         {"models", models},
         {"settings", settings},
         {"train", data.train},
         {"out_of_domain", data.out_of_domain}},
        text);
}

// The definition of a task without the fields that are empty by default.
std::string without_empty_defaults(const tasks::Task& task) {
  tasks::TaskConfig config;
  Fields fields = fields_of(config);
  const auto kind = tasks::kinds().at(task.config.kind).make();
  for (const Field& field : kind->fields()) fields.push_back(field);
  std::set<std::string> empty;
  std::istringstream defaults(to_toml(fields));
  std::istringstream lines(task.definition);
  for (std::string line; std::getline(defaults, line);)
    if (line.ends_with("= \"\"") || line.ends_with("= []")) empty.insert(line);
  std::string text;
  for (std::string line; std::getline(lines, line);)
    if (!empty.contains(line)) text += line + "\n";
  return text;
}

void describe_task(const std::string& name) {
  const tasks::Task task = read_task(name);
  const Json document = {{"kind", "task"},
                         {"name", name},
                         {"about", task.config.about},
                         {"metrics", task.metrics},
                         {"toml", task.definition}};
  print(document, fmt::format("task {}: {}\n  metrics  {}\n\n{}", name, task.config.kind,
                              join(task.metrics), without_empty_defaults(task)));
}

void describe_dataset(const std::string& name) {
  const auto all = tasks_by_dataset();
  const auto found = all.find(name);
  if (found == all.end())
    fail("unknown dataset '{}'{}\n  `assay list datasets` lists all.", name,
         did_you_mean(name, names_of(datasets())));
  print({{"kind", "dataset"}, {"name", name}, {"tasks", found->second}},
        fmt::format("dataset {}: JSON Lines in the folder of --data, read by {}\n", name,
                    join(found->second)));
}

void describe_fields(const std::string& kind, const std::string& name, const std::string& about,
                     const Fields& fields) {
  Json rows = Json::array();
  std::string text = fmt::format("{} {}: {}\n", kind, name, about);
  for (const Field& field : fields) {
    rows.push_back({{"name", field.name},
                    {"type", field.type()},
                    {"default", field.toml()},
                    {"about", field.doc}});
    text += fmt::format("  {:<22} {:<16} {:<10} {}\n", field.name, field.type(), field.toml(),
                        field.doc);
  }
  print({{"kind", kind}, {"name", name}, {"about", about}, {"fields", rows}}, text);
}

void describe_part(const std::string& kind, const std::string& name, const nn::MixerEntry& part) {
  describe_fields(kind, name, part.about, part.fields());
}

void describe(const std::string& kind, const std::string& name) {
  if (kind == "mixer") return describe_part(kind, name, nn::mixers().at(name));
  if (kind == "channel_mixer") return describe_part(kind, name, nn::channel_mixers().at(name));
  if (kind == "op") return describe_operator(name);
  if (kind == "model") return describe_model(name);
  if (kind == "plan") return describe_plan(name);
  if (kind == "task") return describe_task(name);
  if (kind == "dataset") return describe_dataset(name);
  nn::ModelConfig model;
  train::TrainConfig train;
  if (kind == "table" && name == "model")
    return describe_fields(kind, name, "a language model: a pattern of layers", fields_of(model));
  if (kind == "table" && name == "train")
    return describe_fields(kind, name, "how it is trained", fields_of(train));
  const std::vector<std::string> kinds = {"mixer", "channel_mixer", "op",      "model",
                                          "plan",  "task",          "dataset", "table"};
  if (kind == "table")
    fail("unknown table '{}'{}\n  Tables: model, train.", name,
         did_you_mean(name, std::vector<std::string>{"model", "train"}));
  fail("unknown kind '{}'{}\n  Kinds: {}.", kind, did_you_mean(kind, kinds), join(kinds));
}

void add_list(CLI::App& app) {
  auto kind = std::make_shared<std::string>();
  CLI::App* command =
      subcommand(app, "list", "list mixers, channel_mixers, ops, models, plans, tasks or datasets",
                 {"list mixers"});
  command->add_option("kind", *kind,
                      "mixers, channel_mixers, ops, models, plans, tasks or datasets");
  command->callback([kind] { list(*kind); });
}

void add_describe(CLI::App& app) {
  auto words = std::make_shared<std::pair<std::string, std::string>>();
  CLI::App* command =
      subcommand(app, "describe",
                 "show formula, fields, types and defaults of a part, or the question of a plan",
                 {"describe mixer gla", "describe model mamba2"});
  command
      ->add_option("kind", words->first,
                   "mixer, channel_mixer, op, model, plan, task, dataset or table")
      ->required();
  command->add_option("name", words->second, "its name")->required();
  command->callback([words] { describe(words->first, words->second); });
}

const bool list_registered = commands().add("list", add_list);
const bool describe_registered = commands().add("describe", add_describe);

}  // namespace
}  // namespace assay::cli
