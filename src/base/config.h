#pragma once
// Typed configuration. A struct lists its fields once; that list serves parsing, errors on unknown
// keys, the expanded record of a run, `assay describe` and the documentation.
//
//   struct Config {
//     int64_t num_heads = 4;
//     void fields(auto&& field) { field("num_heads", num_heads, "divides d_model"); }
//   };
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/error.h"

namespace assay {

// A value of a configuration cannot be used. The parts are kept, because a study that composed the
// configuration knows better where the value was written and what its table is called. `problem`
// has "{table}" where it names the table.
struct ConfigError : BadInput {
  ConfigError(const std::string& where, std::string table, std::string key, std::string problem);
  std::string table;
  std::string key;
  std::string problem;
};
// "WHERE: PROBLEM. ENDING", with the name of the table filled in.
std::string describe_problem(const std::string& where, std::string problem,
                             const std::string& table, const std::string& ending);

struct Field {
  using Value = std::variant<bool*, int64_t*, double*, std::string*, std::vector<std::string>*,
                             std::vector<int64_t>*, std::vector<double>*>;
  std::string name;
  Value value;
  std::string doc;

  std::string type() const;  // "integer", "list of strings", …
  std::string toml() const;  // the value as TOML, doubles in their shortest exact form
};
using Fields = std::vector<Field>;

// The fields of a config struct, in the order it lists them; they point into `config`.
template <class Config>
Fields fields_of(Config& config) {
  Fields fields;
  config.fields([&](std::string_view name, auto& value, std::string_view doc = "") {
    fields.push_back({std::string(name), &value, std::string(doc)});
  });
  return fields;
}

// Those whose values are not the defaults.
template <class Config>
Fields changed_fields(Config& config) {
  Config defaults;
  const Fields before = fields_of(defaults);
  Fields changed;
  for (Field& field : fields_of(config))
    if (field.toml() != std::ranges::find(before, field.name, &Field::name)->toml())
      changed.push_back(std::move(field));
  return changed;
}

std::string to_toml(const Fields& fields);  // one "name = value" line per field

// A table of a TOML file that knows its place in it. Copies share one document.
class ConfigNode {
 public:
  // Throws BadInput with file, line and column.
  static ConfigNode read_file(const std::filesystem::path& file);
  static ConfigNode parse(std::string_view text, const std::string& source = "text");

  // Applies "a.b=value" (the value is TOML; a bare word is taken as a string). Throws BadInput.
  void set(std::string_view assignment);

  bool has(const std::string& key) const;
  bool is_table(const std::string& key) const;
  std::vector<std::string> keys() const;
  // The table under `key`; empty when absent. BadInput when no table
  ConfigNode child(const std::string& key) const;
  // Fills the fields that are present. BadInput, with the nearest name, on a key that is
  // neither a field nor in `also` and on a value of another type; integers are accepted where
  // doubles are expected.
  void read(const Fields& fields, const std::vector<std::string>& also = {}) const;
  template <class Config>
  void read(Config& config, const std::vector<std::string>& also = {}) const {
    read(fields_of(config), also);
  }
  // A new table with the name of the first layer: the keys of each layer laid over those before it,
  // tables merged recursively. Every value keeps the place where it was written.
  static ConfigNode merged(const std::vector<ConfigNode>& layers);
  // Writes a value, as TOML, under a path of keys below this table.
  void put(const std::string& path, const std::string& toml, const std::string& where);
  void erase(const std::string& key);
  void rename(const std::string& key, const std::string& to);  // does nothing when `key` is absent
  // The value of `key`, as TOML on one line; "" when absent
  std::string value(const std::string& key) const;
  std::string where(const std::string& key) const;   // "plans/demo.toml:9:16"; `key` may be a path
  const std::string& name() const { return name_; }  // "model.hybrid", "" at the root
  std::string toml(const std::string& name) const;   // as a table of that name
  // Throws ConfigError about the value of `key`.
  [[noreturn]] void refuse(const std::string& key, const std::string& problem) const;

 private:
  struct Document;
  ConfigNode(std::shared_ptr<Document> document, void* table, std::string name);
  void note_places(const std::string& name, std::map<std::string, std::string>& places) const;
  std::shared_ptr<Document> document_;
  void* table_;  // toml::table*, owned by the document; null when absent
  std::string name_;
};

}  // namespace assay
