// The tables of hyper-parameters: what differs between the models of a setting, and
// what they share.
#include <algorithm>
#include <map>

#include "base/config.h"
#include "report/tables.h"

namespace assay::report {
namespace {

using Values = std::map<std::string, std::string>;  // "model.d_model" → "64"

void flatten(const ConfigNode& table, const std::string& prefix, Hyperparameters& out) {
  for (const std::string& key : table.keys()) {
    const std::string name = prefix.empty() ? key : prefix + "." + key;
    if (table.is_table(key)) flatten(table.child(key), name, out);
    // In the table of runs
    else if (name != "train.seed" && name != "train.tokens" && name != "train.steps")
      out.emplace_back(name, table.value(key));
  }
}

struct Configurations {
  std::vector<Values> models;
  std::vector<std::string> order;
  explicit Configurations(const Setting& setting) {
    for (const Architecture& a : setting.architectures) {
      Values& values = models.emplace_back();
      for (const auto& [name, value] : hyperparameters(a)) {
        values[name] = value;
        if (!std::ranges::count(order, name)) order.push_back(name);
      }
    }
  }
  bool differs(const std::string& name) const {
    return std::ranges::any_of(
        models, [&](auto& m) { return !m.contains(name) || m.at(name) != models[0].at(name); });
  }
};

std::string thousands(int64_t number) {
  std::string digits = std::to_string(number);
  for (auto at = int64_t(digits.size()) - 3; at > 0; at -= 3) digits.insert(size_t(at), ",");
  return digits;
}

std::string id(const Setting& setting, const char* name) {
  return setting.name.empty() ? name : setting.name + "-" + name;
}

}  // namespace

Hyperparameters hyperparameters(const Architecture& architecture) {
  Hyperparameters out;
  flatten(ConfigNode::parse(architecture.runs().front().data.config), "", out);
  return out;
}

// Meaning of the numbers that are codes and not sizes.
constexpr const char* kCodes =
    "A window of −1 is all positions. "
    "A head_dim, num_kv_heads, d_ff, max_positions or temperature of 0 stands for its default, "
    "which depends on the model. Other zeros are values. "
    "A dash means that the version of Assay that trained the runs did not record the value.";

Table differing_table(const Setting& setting) {
  Table table{id(setting, "hyperparameters-differing"),
              "Hyper-parameters in which the models differ",
              "A difference other than the sequence mixer (block, norm, width, parameters, "
              "state) may explain a result. A matched control is a [model.NAME] table in the plan. "
              "The seeds are those of the largest budget. " +
                  std::string(kCodes),
              {{"hyper-parameter"}},
              {}};
  const Configurations all(setting);
  std::vector<Cell> seeds = {std::string("seeds")};
  std::vector<Cell> parameters = {std::string("parameters")};
  for (const Architecture& a : setting.architectures) {
    table.columns.push_back({a.name});
    std::string list;
    for (const Run& run : a.runs()) list += (list.empty() ? "" : ", ") + std::to_string(run.seed);
    seeds.push_back(list);
    parameters.push_back(thousands(a.runs().front().data.provenance.parameters));
  }
  table.rows = {seeds, parameters};
  for (const std::string& name : all.order) {
    if (all.differs(name)) {
      std::vector<Cell> row = {name};
      for (const Values& model : all.models)
        row.push_back(model.contains(name) ? model.at(name) : "–");
      table.rows.push_back(std::move(row));
    }
  }
  return table;
}

Table common_table(const Setting& setting) {
  Table table{id(setting, "hyperparameters-common"),
              "Hyper-parameters that all models share",
              kCodes,
              {{"hyper-parameter"}, {"value"}},
              {}};
  const Configurations all(setting);
  for (const std::string& name : all.order)
    if (!all.differs(name)) table.rows.push_back({name, all.models[0].at(name)});
  return table;
}

}  // namespace assay::report
