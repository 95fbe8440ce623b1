#include "study/plan.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <ranges>
#include <set>
#include <sstream>

#include "base/program.h"

namespace assay::study {
namespace {

struct Head {
  std::string reference;
  std::vector<std::string> models;
  std::vector<int64_t> seeds = {1};
  std::vector<int64_t> tokens;
  std::vector<int64_t> seeds_per_budget;
  std::string variances;
  void fields(auto&& field) {
    field("reference", reference);
    field("variances", variances);
    field("models", models);
    field("seeds", seeds);
    field("tokens", tokens);
    field("seeds_per_budget", seeds_per_budget);
  }
};
struct ModelHead {
  std::string base;
  std::vector<int64_t> seeds;
  std::vector<int64_t> tokens;
  std::vector<int64_t> seeds_per_budget;
  void fields(auto&& field) {
    field("base", base);
    field("seeds", seeds);
    field("tokens", tokens);
    field("seeds_per_budget", seeds_per_budget);
  }
};

std::vector<fs::path> preset_folders(const fs::path& plan) {
  std::vector<fs::path> folders;
  if (!plan.empty()) folders = {plan.parent_path() / "models", plan.parent_path() / "../models"};
  for (const fs::path& folder : plan_folders()) folders.push_back(folder / "models");
  return folders;
}

std::vector<std::string> names_in(const std::vector<fs::path>& folders) {
  std::vector<std::string> names;
  for (const fs::path& folder : folders)
    if (std::error_code none; fs::is_directory(folder, none))
      for (const auto& entry : fs::directory_iterator(folder))
        if (entry.path().extension() == ".toml") names.push_back(entry.path().stem().string());
  std::ranges::sort(names);
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

// Does the first line with content begin a YAML document? "---" and "key:" begin no TOML document.
bool looks_like_yaml(const fs::path& file) {
  std::error_code none;
  if (!fs::is_regular_file(file, none)) return false;
  std::istringstream lines(read_file(file));
  for (std::string line; std::getline(lines, line);) {
    const size_t begin = line.find_first_not_of(" \t\r");
    if (begin == std::string::npos || line[begin] == '#') continue;
    if (line.starts_with("---")) return true;
    const size_t end = line.find_first_not_of(
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_", begin);
    return end != begin && end != std::string::npos && line[end] == ':';
  }
  return false;
}

void check_name(const std::string& name, const std::string& where) {
  constexpr size_t kLongest = 200;
  const auto allowed = [](unsigned char c) {
    return std::isalnum(c) || std::string_view("_+.-").find(char(c)) < 4;
  };
  if (name.empty() || name.size() > kLongest || name[0] == '.' ||
      !std::ranges::all_of(name, allowed))
    fail(
        "{}: '{:.{}}' cannot name a folder; use at most {} letters, digits, '_', '+', '-' and '.'. "
        "Nothing was run.",
        where, name, kLongest, kLongest);
}

// A pattern (or channel mixer) of its own leaves behind the base's tables of parts that it
// no longer names.
bool left_behind(const std::string& table, const ConfigNode& preset, const ConfigNode& own) {
  const auto dropped = [&](const char* field) {
    const auto names = [&](const ConfigNode& layer) {
      return layer.value(field).find('"' + table + '"') != std::string::npos;
    };
    return preset.has(field) && own.has(field) && names(preset) && !names(own);
  };
  return !own.has(table) && (dropped("pattern") || dropped("channel_mixer"));
}

[[noreturn]] void refuse(const std::string& where, const std::string& what) {
  fail("{}: {}. Nothing was run.", where, what);
}

// Keys of [train] that the plan decides elsewhere.
void check_train(const ConfigNode& train) {
  for (const char* key : {"seed", "domains", "sequence_length", "eval_sets"})
    if (train.has(key))
      refuse(train.where(key),
             fmt::format("'{}' in train is decided by the plan's seeds and data", key));
}

void check_budgets(const std::vector<int64_t>& tokens, const ConfigNode& table) {
  const std::string where = table.where("tokens");
  if (table.has("tokens") && tokens.empty())
    refuse(where, "tokens is empty; give at least one training budget, or remove the key");
  for (const int64_t budget : tokens)
    if (budget < 1)
      refuse(where,
             fmt::format("tokens = {} is not a training budget; give positive numbers", budget));
  if (!std::ranges::is_sorted(tokens, std::less_equal{}))
    refuse(where, "the budgets in tokens must be distinct and in ascending order");
}

void check_seeds(const std::vector<int64_t>& seeds, const ConfigNode& table) {
  const std::string where = table.where("seeds");
  if (seeds.empty()) refuse(where, "seeds is empty");
  for (const int64_t seed : seeds)
    if (std::ranges::count(seeds, seed) > 1)
      refuse(where, fmt::format("seeds gives the seed {} twice", seed));
}

// `counts` says how many of `seeds` each budget gets, from the first; all of them when it is empty.
std::vector<Budget> budgets_of(const std::vector<int64_t>& tokens,
                               const std::vector<int64_t>& seeds,
                               const std::vector<int64_t>& counts, const std::string& where) {
  if (tokens.empty() && counts.empty()) return {{.seeds = seeds}};
  if (!counts.empty() && counts.size() != tokens.size())
    refuse(where, fmt::format("seeds_per_budget has {} numbers for {} budgets in tokens",
                              counts.size(), tokens.size()));
  std::vector<Budget> budgets;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const int64_t count = counts.empty() ? std::ssize(seeds) : counts[i];
    if (count < 1 || count > std::ssize(seeds))
      refuse(where, fmt::format("seeds_per_budget has {}; expected 1 to {}, the number of seeds",
                                count, seeds.size()));
    budgets.push_back({tokens[i], {seeds.begin(), seeds.begin() + count}});
  }
  return budgets;
}

// A ladder that cannot carry a comparison is refused before anything is trained.
Ladder read_ladder(const ConfigNode& root) {
  const ConfigNode table = root.child("ladder");
  Ladder ladder;
  table.read(ladder);
  check_budgets(ladder.tokens, table);
  if (ladder.tokens.size() < 2)
    refuse(table.where("tokens"),
           "a ladder needs at least two budgets, because other models are compared between them. "
           "Three to five budgets are usual, each twice the one before");
  check_seeds(ladder.seeds, table);
  if (ladder.seeds.size() < 2)
    refuse(table.where("seeds"),
           "a ladder needs at least two seeds, which show how much the reference itself varies. "
           "Four or more are usual");
  for (const int64_t count : ladder.seeds_per_budget)
    if (count < 2)
      refuse(table.where("seeds_per_budget"), "every budget of a ladder needs at least two seeds");
  return ladder;
}

Tuning read_tuning(const ConfigNode& root) {
  const ConfigNode table = root.child("tune");
  Tuning tuning;
  table.read(tuning);
  for (const double rate : tuning.learning_rate)
    if (!(rate > 0) || !std::isfinite(rate))
      refuse(table.where("learning_rate"),
             fmt::format("a learning rate of {} is not a positive number", rate));
  if (!std::ranges::is_sorted(tuning.learning_rate, std::less_equal{}))
    refuse(table.where("learning_rate"),
           "the learning rates must be distinct and in ascending order");
  if (tuning.learning_rate.size() < 2)
    refuse(table.where("learning_rate"),
           "tuning needs a grid of at least two learning rates, "
           "and three or more to bracket the best; for one fixed rate, "
           "give train.learning_rate and no tune");
  if (tuning.tokens < 1)
    refuse(table.where(table.has("tokens") ? "tokens" : "learning_rate"),
           "tune.tokens must be given: the budget of the tuning runs");
  check_seeds(tuning.seeds, table);
  return tuning;
}

// A relative path of the plan: from the working folder, or else from the folder of the plan.
std::string found_path(const std::string& path, const fs::path& plan) {
  const fs::path beside = plan.parent_path() / path;
  std::error_code none;
  return !fs::exists(path, none) && fs::exists(beside, none) ? beside.string() : path;
}

TaskPlan read_tasks(const ConfigNode& root, const fs::path& file) {
  if (!root.is_table("tasks"))
    refuse(root.where("tasks"),
           "tasks must be a table, for example tasks = { data = \"FOLDER\", list = [\"piqa\"] }");
  const ConfigNode table = root.child("tasks");
  TaskPlan tasks;
  table.read(tasks);
  if (tasks.list.empty())
    refuse(table.where("list"), "tasks.list names no task; `assay list tasks` shows the names");
  tasks.data = found_path(tasks.data, file);
  if (!fs::is_directory(tasks.data))
    refuse(table.where("data"), fmt::format("tasks.data: there is no folder '{}'", tasks.data));
  if (tasks.limit < 0) refuse(table.where("limit"), "tasks.limit must be 0 or more");
  if (tasks.max_length < 0) refuse(table.where("max_length"), "tasks.max_length must be 0 or more");
  std::set<std::string> names;
  for (std::string& task : tasks.list) {
    if (!names.insert(fs::path(task).stem()).second)
      refuse(table.where("list"), fmt::format("two tasks of the list have the name '{}'",
                                              fs::path(task).stem().string()));
    if (task.ends_with(".toml")) task = found_path(task, file);
  }
  tasks.place = table.where("list");
  return tasks;
}

// Where the model has a Python file, its path from here.
void find_python(ConfigNode model, const fs::path& plan) {
  const std::string value = model.value("python");
  if (value.size() < 2 || !value.ends_with(".py" + value.substr(value.size() - 1))) return;
  const std::string path = value.substr(1, value.size() - 2);
  const std::string where = model.where("python");
  model.put("python", '"' + found_path(path, plan) + '"', where);
}

Model read_model(const std::string& name, const ConfigNode& root, const Head& head,
                 const fs::path& file) {
  check_name(name, root.where("models"));
  const ConfigNode tables = root.child("model");
  const ConfigNode own = tables.child(name);
  ModelHead mine{.base = name, .seeds = head.seeds, .tokens = head.tokens};
  const bool on_ladder = name == head.reference && root.has("ladder");
  if (on_ladder) {
    const Ladder ladder = read_ladder(root);
    mine.seeds = ladder.seeds;
    mine.tokens = ladder.tokens;
    mine.seeds_per_budget = ladder.seeds_per_budget;
  } else if (!own.has("seeds") && !own.has("tokens")) {
    mine.seeds_per_budget = head.seeds_per_budget;
  }
  auto keys = own.keys();
  // The other keys of this table belong to the model; the program that builds it checks them
  own.read(mine, keys);
  find_python(own, file);
  const std::string where = own.has("base")    ? own.where("base")
                            : tables.has(name) ? tables.where(name)
                                               : root.where("models");
  const ConfigNode preset =
      ConfigNode::read_file(preset_file(mine.base, where, file, tables.keys())).child("model");
  const ConfigNode size = root.child("size");
  if (own.has("seeds")) check_seeds(mine.seeds, own);
  check_budgets(mine.tokens, own.has("tokens") ? own : on_ladder ? root.child("ladder") : root);
  const ConfigNode counts = own.has("seeds_per_budget") ? own
                            : on_ladder                 ? root.child("ladder")
                                                        : root;
  Model model{
      name,
      budgets_of(mine.tokens, mine.seeds, mine.seeds_per_budget, counts.where("seeds_per_budget")),
      {preset, size, own},
      own.child("train"),
      {}};
  check_train(model.train);
  for (const std::string& key : size.keys())
    if (size.is_table(key) && !preset.has(key) && !own.has(key)) model.absent.push_back(key);
  for (const std::string& key : preset.keys())
    if (preset.is_table(key) && left_behind(key, preset, own)) model.absent.push_back(key);
  return model;
}

// A table of `size` is for the models that have it; one that none has is a slip.
void check_size(const ConfigNode& size, const std::vector<Model>& models) {
  std::vector<std::string> tables;
  for (const Model& model : models)
    for (const ConfigNode& layer : {model.layers.front(), model.layers.back()})
      for (const std::string& key : layer.keys())
        if (layer.is_table(key) && !std::ranges::count(tables, key)) tables.push_back(key);
  for (const std::string& key : size.keys())
    if (size.is_table(key) && !std::ranges::count(tables, key))
      fail("{}: no model of the plan has a table '{}'{}\n  They have: {}. Nothing was run.",
           size.where(key), key, did_you_mean(key, tables), join(tables));
}

// Keys of `train` that other keys of the plan make ineffective.
void check_train_is_used(const Plan& plan) {
  const auto has_budgets = [](const Model& model) { return model.budgets.front().tokens > 0; };
  const auto check_budget = [](const ConfigNode& train, const std::string& who) {
    for (const char* key : {"steps", "tokens"})
      if (train.has(key))
        refuse(train.where(key),
               fmt::format("'{}' in train has no effect, because {} has budgets in tokens. "
                           "Remove one of them",
                           key, who));
  };
  for (const Model& model : plan.models)
    if (has_budgets(model)) check_budget(model.train, fmt::format("model '{}'", model.name));
  for (const Setting& setting : plan.settings)
    for (const ConfigNode& train : setting.train_layers) {
      if (std::ranges::all_of(plan.models, has_budgets)) check_budget(train, "every model");
      if (plan.tuning && train.has("learning_rate"))
        refuse(train.where("learning_rate"),
               "learning_rate in train has no effect, because tune chooses the learning rates. "
               "Remove it, or give it in [model.NAME] to a model that is not to be tuned");
    }
}

// Models were chosen on the command line: what the plan says of others has no meaning then.
bool chosen(const ConfigNode& root) { return root.where("models").starts_with("--set "); }

// Where the last layer that has `key` has it; without one, the first layer's place.
std::string place(const std::vector<ConfigNode>& layers, const std::string& key) {
  const ConfigNode* last = last_with(layers, key);
  return (last ? *last : layers.front()).where(key);
}

void check_setting(const Setting& setting) {
  const DataSetting& data = setting.data;
  if (data.train.empty())
    refuse(place(setting.data_layers, "train"),
           "data.train names no domain; expected, for example, train = [\"cc\", \"c4\"]");
  if (data.sequence_length < 1)
    refuse(place(setting.data_layers, "sequence_length"),
           "data.sequence_length must be given and at least 1");
  for (const auto& [key, domains] : {std::pair{"train", &data.train},
                                     {"out_of_domain", &data.out_of_domain},
                                     {"further", &data.further}})
    for (const std::string& domain : *domains)
      if (std::ranges::count(*domains, domain) > 1)
        refuse(place(setting.data_layers, key),
               fmt::format("data.{} names the domain '{}' twice", key, domain));
  for (const std::string& domain : data.out_of_domain)
    if (std::ranges::count(data.train, domain))
      refuse(place(setting.data_layers, "out_of_domain"),
             fmt::format("'{}' is both trained on and out of domain", domain));
  for (const std::string& domain : data.further)
    if (std::ranges::count(data.train, domain) || std::ranges::count(data.out_of_domain, domain))
      refuse(place(setting.data_layers, "further"),
             fmt::format("'{}' is in data.train or data.out_of_domain, too", domain));
  for (const ConfigNode& layer : setting.train_layers) check_train(layer);
}

Setting read_setting(const std::string& name, const ConfigNode& root, const ConfigNode& own) {
  own.read(Fields{}, {"data", "train"});
  Setting setting{
      name, {}, {root.child("data"), own.child("data")}, {root.child("train"), own.child("train")}};
  for (const ConfigNode& layer : setting.data_layers) layer.read(setting.data, {"synthetic"});
  check_setting(setting);
  return setting;
}

std::vector<Setting> read_settings(const ConfigNode& root) {
  const ConfigNode tables = root.child("setting");
  if (tables.keys().empty()) return {read_setting("", root, tables)};
  std::vector<Setting> settings;
  for (const std::string& name : tables.keys()) {
    check_name(name, tables.where(name));
    settings.push_back(read_setting(name, root, tables.child(name)));
  }
  return settings;
}

void check_head(const Head& head, const ConfigNode& root, const fs::path& file) {
  if (head.models.empty())
    fail("{}: models is empty; name at least the reference. Nothing was run.",
         root.where("models"));
  check_seeds(head.seeds, root);
  if (head.reference.empty())
    fail(
        "{}: the key 'reference' is missing; give one of the models, "
        "for example reference = \"{}\"\n  models = [{}]. "
        "Nothing was run.",
        root.where("reference"), head.models.front(), join(head.models));
  if (!std::ranges::count(head.models, head.reference))
    fail("{}: the reference '{}' is not among the models{}\n  models = [{}]. Nothing was run.",
         root.where("reference"), head.reference, did_you_mean(head.reference, head.models),
         join(head.models));
  if (chosen(root)) return;
  // Before the name of a slip is suggested for a table
  for (const std::string& name : head.models) {
    check_name(name, root.where("models"));
    if (!root.child("model").has(name))
      preset_file(name, root.where("models"), file, root.child("model").keys());
  }
  for (const std::string& name : root.child("model").keys())
    if (!std::ranges::count(head.models, name))
      fail("{}: [model.{}] is not among the models{}\n  models = [{}]. Nothing was run.",
           root.child("model").where(name), name, did_you_mean(name, head.models),
           join(head.models));
}

// The keys of [train] of a run that the plan decides.
ConfigNode decided(const DataSetting& data, Variation variation) {
  std::vector<std::string> domains = data.train;
  std::vector<std::string> sets;
  for (const std::string& domain : data.train) sets.push_back(domain + "." + data.held_out);
  for (const auto* domains : {&data.out_of_domain, &data.further})
    for (const std::string& domain : *domains) sets.push_back(domain + "." + data.test);
  int64_t length = data.sequence_length;
  Fields fields = {{"seed", &variation.seed, ""},
                   {"sequence_length", &length, ""},
                   {"domains", &domains, ""},
                   {"eval_sets", &sets, ""}};
  if (variation.tokens > 0) fields.push_back({"tokens", &variation.tokens, ""});
  if (variation.learning_rate > 0)
    fields.push_back({"learning_rate", &variation.learning_rate, ""});
  return ConfigNode::parse(to_toml(fields), "data, seeds and budgets of the plan");
}

std::vector<ConfigNode> train_layers(const Model& model, const Setting& setting) {
  std::vector<ConfigNode> layers = setting.train_layers;
  layers.push_back(model.train);
  return layers;
}

// The table that the plan names, relative to its own folder.
std::vector<VarianceRow> read_variances(const Head& head, const ConfigNode& root,
                                        const fs::path& file) {
  if (head.variances.empty()) return {};
  const fs::path table = file.parent_path() / head.variances;
  if (!fs::exists(table))
    refuse(root.where("variances"), fmt::format("variances: there is no file '{}'; "
                                                "`assay report STUDY --variances FILE` writes one",
                                                table.string()));
  return read_record<VarianceTable>(table).rows;
}

}  // namespace

std::vector<fs::path> plan_folders() {
  return {"plans", own_folder() / "plans", own_folder() / "../plans"};
}

fs::path plan_file(const fs::path& name) {
  std::error_code none;
  // A folder is not a plan: `assay run demo -o demo` must find the plan again.
  const bool is_file = fs::exists(name, none) && !fs::is_directory(name, none);
  if (is_file) return name;
  const fs::path known = name.has_extension() && name.begin()->string() == "plans"
                             ? name.lexically_relative("plans")
                             : name;
  for (const fs::path& folder : plan_folders()) {
    if (name.has_extension() && fs::exists(folder / known, none))
      fail("{}: there is no such file; did you mean the plan '{}'? Nothing was run.", name.string(),
           fs::path(known).replace_extension().string());
    if (const fs::path file = (folder / name).string() + ".toml"; fs::exists(file, none))
      return file;
  }
  if (name.has_extension()) return name;
  std::vector<std::string> names = names_of_plans("");
  for (const std::string folder : {"ablations", "mqar"})
    for (const std::string& plan : names_of_plans(folder)) names.push_back(folder + "/" + plan);
  fail("unknown plan '{}'{}\n  Plans: {}. A file is named with its .toml. Nothing was run.",
       name.string(), did_you_mean(name.string(), names),
       names.empty() ? "none found" : join(names));
}

fs::path preset_file(const std::string& name, const std::string& where, const fs::path& plan,
                     const std::vector<std::string>& also) {
  const auto folders = preset_folders(plan);
  for (const fs::path& folder : folders)
    if (std::error_code none; fs::exists(folder / (name + ".toml"), none))
      return folder / (name + ".toml");
  auto names = names_in(folders);
  const std::string there = names.empty() ? "none found" : join(names);
  if (std::ranges::find(also, name) != also.end())
    fail(
        "{}: there is no preset '{}', and the table [model.{}] has no base. "
        "Add one, such as base = \"transformer++\".\n  Presets: {}. Nothing was run.",
        where, name, name, there);
  std::ranges::copy(also, std::back_inserter(names));
  fail("{}unknown model '{}'{}\n  Presets: {}.{} Nothing was run.",
       where.empty() ? "" : where + ": ", name, did_you_mean(name, names), there,
       plan.empty() ? " A file is named with its .toml."
                    : fmt::format(" A [model.{}] table with a base defines one.", name));
}

std::vector<std::string> names_of_plans(const std::string& subfolder) {
  std::vector<fs::path> folders = plan_folders();
  for (fs::path& folder : folders) folder /= subfolder;
  return names_in(folders);
}

const ConfigNode* last_with(const std::vector<ConfigNode>& layers, const std::string& key) {
  const auto last = std::ranges::find_if(layers.rbegin(), layers.rend(),
                                         [&](auto& layer) { return layer.has(key); });
  return last == layers.rend() ? nullptr : &*last;
}

std::vector<std::string> first_comment(const std::string& toml) {
  std::vector<std::string> lines;
  std::istringstream text(toml);
  for (std::string line; std::getline(text, line) && line.starts_with('#');)
    lines.push_back(line.substr(std::min(line.find_first_not_of("# "), line.size())));
  return lines;
}

std::string first_sentence(const std::string& text) {
  for (size_t at = 0; (at = text.find_first_of(".?", at)) != std::string::npos; ++at)
    if (at + 1 == text.size() || text[at + 1] == ' ') return text.substr(0, at + 1);
  return text;
}

std::string opening_sentence(const std::string& toml) {
  return first_sentence(join(first_comment(toml), " "));
}

Plan read_plan(const fs::path& file, const std::vector<std::string>& assignments) {
  if (looks_like_yaml(file))
    fail(
        "{}: looks like YAML, and plans are TOML: seeds = [1, 2] in the place of seeds: [1, 2]. "
        "`assay plan new` writes a plan to begin with. Nothing was run.",
        file.string());
  ConfigNode root = ConfigNode::read_file(file);
  std::string text = read_file(file);
  for (const std::string& assignment : assignments) {
    root.set(assignment);
    text += "# --set " + assignment + "\n";
  }
  Head head;
  root.read(head, {"data", "train", "size", "model", "setting", "ladder", "tune", "tasks"});
  check_head(head, root, file);
  Plan plan{.name = file.stem().string(),
            .text = text,
            .reference = head.reference,
            .settings = read_settings(root),
            .has_ladder = root.has("ladder")};
  if (root.has("tune")) plan.tuning = read_tuning(root);
  if (root.has("tasks")) plan.tasks = read_tasks(root, file);
  plan.variances = read_variances(head, root, file);
  for (const std::string& name : head.models)
    plan.models.push_back(read_model(name, root, head, file));
  if (!chosen(root)) check_size(root.child("size"), plan.models);
  check_train_is_used(plan);
  return plan;
}

Composed compose(const Model& model, const Setting& setting, const Variation& variation) {
  std::vector<ConfigNode> train = train_layers(model, setting);
  train.push_back(decided(setting.data, variation));
  Composed out{model.name, model.layers, ConfigNode::merged(model.layers),
               ConfigNode::merged(train)};
  for (const std::string& key : model.absent) out.model.erase(key);
  for (const char* key : {"base", "seeds", "tokens", "seeds_per_budget", "train"})
    out.model.erase(key);
  // A budget of the variation replaces the one that `train` gives.
  if (variation.tokens > 0) out.train.erase("steps");
  return out;
}

std::string Composed::toml() const { return model.toml("model") + train.toml("train"); }

std::string Composed::translate(const TrainerError& error) const {
  if (!error.table || !error.key || !error.problem)
    return describe_problem(
        (model.has("python") ? model.where("python") + ": " : "") + "model." + name, error.error,
        "", "Nothing was run.");
  const size_t dot = std::min(error.table->find('.'), error.table->size());
  const std::string inner = error.table->substr(dot);  // ".attention" of "model.attention"
  const bool in_train = error.table->substr(0, dot) == "train";
  const std::string path = inner.empty() ? *error.key : inner.substr(1) + "." + *error.key;
  std::string where = (in_train ? train : model).where(path);
  // A preset fits together. A table of it that does not fit d_model was made wrong by the layer
  // that changed d_model.
  const bool of_width = !in_train && error.problem->find("d_model") != std::string::npos;
  if (of_width && last_with(layers, "d_model") > last_with(layers, path))
    where = model.where("d_model");
  return describe_problem(where, *error.problem, in_train ? *error.table : "model." + name + inner,
                          "Nothing was run.");
}

double learning_rate_of(const Model& model, const Setting& setting) {
  const auto layers = train_layers(model, setting);
  const ConfigNode* layer = last_with(layers, "learning_rate");
  if (!layer) return 0;
  double rate = 0;
  layer->read({{"learning_rate", &rate, ""}}, layer->keys());
  return rate;
}

bool is_tuned(const Plan& plan, const Model& model) {
  return plan.tuning && !model.train.has("learning_rate");
}

}  // namespace assay::study
