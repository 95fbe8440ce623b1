#pragma once
// A plan is a question in TOML: models, seeds and training budgets, and the reference that every
// difference is measured against.
//
//   reference = "transformer++"
//   models    = ["transformer++", "window"]    # presets (models/*.toml), or [model.NAME] below
//   seeds     = [1, 2]
//   tokens    = [81_920_000, 163_840_000]      # budgets of every model but the reference
//   ladder    = { tokens = [20_480_000, 40_960_000, 81_920_000], seeds = [1, 2, 3, 4] }
//   tune      = { learning_rate = [1e-3, 2e-3, 4e-3], tokens = 20_480_000 }
//   data      = { store = "FOLDER" | synthetic = { documents = 4000 }, train = ["cc", "c4"],
//                 out_of_domain = ["arxiv"], further = ["verse"], sequence_length = 512,
//                 held_out = "valid", test = "test" }
//   train     = { batch = 16, … }              # every key of a run's [train]
//   # Laid over [model] of every model; a table in it, over the models that have that table:
//   size      = { d_model = 256, attention = { num_heads = 4 } }
//   tasks     = { data = "FOLDER", list = ["piqa", "mine.toml"] }   # on the final weights
//   variances = "variances.json"               # between seeds, of other studies (`assay report`)
//   [model.twin]                               # laid over its base, after `size`
//   base   = "transformer++"
//   seeds  = [11, 12]
//   tokens = [163_840_000]
//   train  = { learning_rate = 4e-3 }          # over `train`; a rate here is not tuned
//   [setting.long]                             # one or many; each over `data` and `train`
//   data = { sequence_length = 2048 }
//
// Without `tokens` and `ladder`, train.steps or train.tokens is the only budget.
// With an empty out_of_domain (the mixed-domain setting) models are compared on held-out text of
// the training domains.
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/files.h"
#include "base/record.h"
#include "run/tasks.h"

namespace assay::study {

// The comment at the beginning of a TOML text, by lines, and the first sentence of a text.
std::vector<std::string> first_comment(const std::string& toml);
std::string first_sentence(const std::string& text);
// The first sentence of that comment: the question of a plan. "" without a comment.
std::string opening_sentence(const std::string& toml);

struct DataSetting {
  std::string store;                       // folder; "" when given by --data or synthetic
  std::vector<std::string> train;          // domains
  std::vector<std::string> out_of_domain;  // domains whose mean loss is compared
  std::vector<std::string> further;        // more unseen domains; each is compared, too
  int64_t sequence_length = 0;
  // Split of the training domains: held-out text of what was trained on
  std::string held_out = "valid";
  std::string test = "test";  // split of the other domains
  void fields(auto&& field) {
    field("store", store);
    field("train", train);
    field("out_of_domain", out_of_domain);
    field("further", further);
    field("sequence_length", sequence_length);
    field("held_out", held_out);
    field("test", test);
  }
};

// The last of the layers that has `key`; null for none.
const ConfigNode* last_with(const std::vector<ConfigNode>& layers, const std::string& key);

// An error as `assay --json` prints it; the last three are there when a value of a configuration is
// the reason (ConfigError in base/config.h).
struct TrainerError {
  std::string error;
  std::optional<std::string> table;
  std::optional<std::string> key;
  std::optional<std::string> problem;
  ASSAY_FIELDS(error, table, key, problem)
};

// The configuration of a run, composed of layers. Its values know where in the plan they are
// written.
struct Composed {
  std::string name;                // of the model
  std::vector<ConfigNode> layers;  // of `model`, the later over the earlier
  ConfigNode model;
  ConfigNode train;
  std::string toml() const;  // MODEL.toml
  // An error of the trainer about it, told in terms of the plan.
  std::string translate(const TrainerError& error) const;
};

struct Setting {
  std::string name;  // "" when the plan has only one
  DataSetting data;
  // the plan's, then the setting's
  std::vector<ConfigNode> data_layers;
  std::vector<ConfigNode> train_layers;
  // The tasks of the plan, as ask_tasks (tasks.h) finds them
  std::vector<run::TaskQuestion> tasks = {};
};
// `ladder`: the budgets of the reference, each trained through its complete schedule.
struct Ladder {
  std::vector<int64_t> tokens;
  std::vector<int64_t> seeds;
  std::vector<int64_t> seeds_per_budget;
  void fields(auto&& field) {
    field("tokens", tokens);
    field("seeds", seeds);
    field("seeds_per_budget", seeds_per_budget);
  }
};
// `tune`: the learning rate of each model, chosen by held-out loss alone on runs
// of `tokens` tokens.
struct Tuning {
  std::vector<double> learning_rate;
  int64_t tokens = 0;
  std::vector<int64_t> seeds = {1};
  bool check = false;
  void fields(auto&& field) {
    field("learning_rate", learning_rate);
    field("tokens", tokens);
    field("seeds", seeds);
    field("check", check);
  }
};
// `tasks`: what the final weights of every run are evaluated on, as by `assay eval tasks`.
struct TaskPlan {
  std::vector<std::string> list;  // names and task files
  std::string data = ".";         // folder of the documents
  int64_t limit = 0;              // documents per task, the first ones; 0: all
  int64_t max_length = 0;         // tokens read at most; 0: what each model reads
  std::string place;              // in the plan
  void fields(auto&& field) {
    field("list", list);
    field("data", data);
    field("limit", limit);
    field("max_length", max_length);
  }
};
// One run length of a model, in training tokens, and the seeds that are trained for it.
struct Budget {
  int64_t tokens = 0;  // 0: train.steps or train.tokens decides
  std::vector<int64_t> seeds;
};
struct Model {
  std::string name;
  std::vector<Budget> budgets;     // at least one, in ascending order
  std::vector<ConfigNode> layers;  // of [model], the later over the earlier
  ConfigNode train;                // the model's own keys of [train]
  // Tables of `size` that the model does not have, and of its base that it left
  std::vector<std::string> absent;
};
// Variances between the seeds of a model in another study (stats::SeedVariance).
struct VarianceRow {
  std::string study;
  std::string model;
  double tokens = 0;
  int64_t seeds = 0;
  std::map<std::string, double> variance;  // by measure
  ASSAY_FIELDS(study, model, tokens, seeds, variance)
};
// A file of them.
struct VarianceTable {
  std::vector<VarianceRow> rows;
  ASSAY_FIELDS(rows)
};
struct Plan {
  std::string name;
  std::string text;
  std::string reference;
  std::vector<Setting> settings;
  std::vector<Model> models;
  std::optional<Tuning> tuning;
  std::optional<TaskPlan> tasks = {};
  bool has_ladder = false;
  std::vector<VarianceRow> variances = {};
};

// Values that differ between the runs of one model in one setting.
struct Variation {
  int64_t seed = 0;
  int64_t tokens = 0;        // the budget; 0: train.steps or train.tokens decides
  double learning_rate = 0;  // 0: train.learning_rate decides
};
// The learning rate that `train` gives to the model in the setting; 0 when none does.
double learning_rate_of(const Model& model, const Setting& setting);
// Is the learning rate of the model chosen by tuning? Not when its own `train` has one.
bool is_tuned(const Plan& plan, const Model& model);

// A preset's file: NAME.toml in models/ beside the plan or beside its folder, else in
// plans/models/ here or beside the program. BadInput at `where` with the nearest of those there
// are and of `also`.
fs::path preset_file(const std::string& name, const std::string& where = "",
                     const fs::path& plan = {}, const std::vector<std::string>& also = {});
// A plan's file: the file itself, or NAME.toml in plans/ here or beside the program. BadInput with
// the nearest name.
fs::path plan_file(const fs::path& name);
// The folders that are searched for plans and, in models/, for presets.
std::vector<fs::path> plan_folders();
// Names of the TOML files in plans/SUBFOLDER, here or else beside the program: presets in "models",
// plans in "".
std::vector<std::string> names_of_plans(const std::string& subfolder);

// Reads and checks everything that the plan itself decides, assignments such as train.steps=100
// laid over it (where they give `models`, tables of models left out, and those of `size` that no
// model has, are passed over). BadInput with position and nearest name; nothing is run.
Plan read_plan(const fs::path& file, const std::vector<std::string>& assignments = {});

// The configuration of one run.
Composed compose(const Model& model, const Setting& setting, const Variation& variation);

}  // namespace assay::study
