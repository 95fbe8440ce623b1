#pragma once
// Families of models in Hugging Face's layout: what their settings and tensors are called here. A
// file a family.
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/registry.h"
#include "nn/language_model.h"

namespace assay::exchange {

using namespace nn;  // this header is private to the layer

using Names = std::vector<std::string>;

// A value of [model] or of a table in it, and where it is written; `where` is empty for what the
// layout implies.
struct Value {
  template <class T>
  Value(std::string our_key, T value, std::string place = "")
      : key(std::move(our_key)), toml(Field{"", &value, ""}.toml()), where(std::move(place)) {}
  Value(std::string our_key, const char* value, std::string place = "")
      : Value(std::move(our_key), std::string(value), std::move(place)) {}
  std::string key;  // "attention.num_heads"
  std::string toml;
  std::string where;
};

// config.json. Messages name the file and the key.
class Settings {
 public:
  Settings(nlohmann::json values, std::string where)
      : values_(std::move(values)), where_(std::move(where)) {}
  template <class T>
  T get(const std::string& key) const {
    if (!has(key)) fail("{}: '{}' is missing. Nothing was written.", where_, key);
    const nlohmann::json& value = values_.at(key);
    if constexpr (std::is_same_v<T, bool>) check(key, value.is_boolean(), "true or false");
    else if constexpr (std::is_integral_v<T>) check(key, value.is_number_integer(), "an integer");
    else if constexpr (std::is_floating_point_v<T>) check(key, value.is_number(), "a number");
    else if constexpr (std::is_same_v<T, std::string>) check(key, value.is_string(), "a string");
    return value.get<T>();
  }
  template <class T>
  T get(const std::string& key, T absent) const {
    return has(key) ? get<T>(key) : absent;
  }
  // The setting `theirs` as our value `ours`.
  template <class T>
  Value as(const std::string& ours, const std::string& theirs) const {
    return {ours, get<T>(theirs), place(theirs)};
  }
  template <class T>
  Value as(const std::string& ours, const std::string& theirs, T absent) const {
    return {ours, get<T>(theirs, absent), place(theirs)};
  }
  std::string place(const std::string& key) const { return fmt::format("{}: '{}'", where_, key); }
  // Only these values are understood; absent or null will do too. BadInput names key and value.
  void expect(const std::string& key, const std::vector<nlohmann::json>& understood) const;
  // Only these keys have values other than null. BadInput names the first of the others.
  void expect_only(const std::vector<std::string>& understood) const;
  bool has(const std::string& key) const {
    return values_.contains(key) && !values_.at(key).is_null();
  }
  bool is_null(const std::string& key) const {
    return values_.contains(key) && values_.at(key).is_null();
  }
  Settings child(const std::string& key) const;  // the object under `key`; empty when absent

 private:
  void check(const std::string& key, bool right, const char* expected) const {
    if (!right)
      fail("{}: '{}' is {}, expected {}. Nothing was written.", where_, key, values_.at(key).dump(),
           expected);
  }
  nlohmann::json values_;
  std::string where_;
};

// How theirs stands to ours: as ours; [in, out]; [rows, 1, columns]; [columns] of one row of ours;
// [1, 1, n] of our [n].
enum class Layout { same, transposed, unsqueezed, row, flattened };

struct Part {
  std::string name;   // theirs
  int64_t share = 1;  // of the rows of ours
  Layout layout = Layout::same;
  // When not empty: theirs is `groups` blocks of rows, each with sections of these sizes; ours has
  // section after section.
  std::vector<int64_t> sections = {};
  int64_t groups = 1;
  std::string older = "";  // another name that files have
};
// Our tensor is theirs, brought into our layout and stacked by rows in this order.
struct Rule {
  std::string ours;
  std::vector<Part> theirs;
  // Rows of the stack, counted in shares: these rows are the last ones of ours.
  struct Range {
    int64_t begin = 0;
    int64_t count = 0;
  } last = {};
  bool any_split = false;  // files may cut the stack at other rows
};

// Values of [model] with every default written out, by dotted key.
class Expanded {
 public:
  explicit Expanded(const ModelSpec& spec)
      : model_(ConfigNode::parse(spec.toml()).child("model")) {}
  std::string text(const std::string& key) const;                       // as TOML; "" when absent
  bool has(const std::string& part) const { return model_.has(part); }  // a mixer or channel mixer
  template <class T>
  T get(const std::string& key) const {
    T value{};
    const auto [table, name] = find(key);
    table.read(Fields{{name, &value, ""}}, table.keys());
    return value;
  }

 private:
  std::pair<ConfigNode, std::string> find(const std::string& key) const;
  ConfigNode model_;
};

// Requirements of a layout. A requirement of a mixer that the model lacks is met.
struct Requirement {
  std::string key;                    // of Expanded
  std::vector<std::string> accepted;  // as TOML; empty: any value
};

struct Family {
  // Prefix of all names except the head's; files of the bare model omit it
  std::string prefix;
  std::vector<std::string> left_out;   // regular expressions: ends of names of unused tensors
  std::vector<Requirement> requires_;  // what a model must be to have this layout
  // [model] and its tables; BadInput for what is not understood
  std::vector<Value> (*values)(const Settings&);
  nlohmann::json (*config)(const Expanded&);  // what transformers reads
  std::vector<Rule> (*rules)(const Expanded&);
  std::map<std::string, std::string> renamed = {};  // older names of their tensors, and the newer
  // model_type of models whose text_config has this layout, and whose other parts are not read
  std::string multimodal = "";
  bool on_request = false;  // written only when no other layout fits or --layout names it
  std::string library = "transformers";  // the Hub's name of the library that reads it
};
Registry<Family>& families();

struct AttentionShape {
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
};
AttentionShape attention_shape(const Expanded& model);

struct DeltaShape {
  // of one head
  int64_t heads;
  int64_t key_heads;
  int64_t key_dim;
  int64_t value_dim;
};
DeltaShape delta_shape(const Expanded& model);  // of gated_delta_net, with its defaults

// Tensors of gated_delta_net, with the names of flash-linear-attention, but its output projection.
void add_gated_delta(std::vector<Rule>& rules, const Expanded& model, const std::string& ours,
                     const std::string& theirs);

// d_ff of swiglu or geglu
int64_t gated_width(const Expanded& model, const std::string& channel_mixer);
// channel_mixer of layer `ours` from `theirs`mlp.{gate,up,down}_proj: weights or biases.
void add_gated_mlp(std::vector<Rule>& rules, const std::string& ours, const std::string& theirs,
                   const std::string& kind = "weight");

}  // namespace assay::exchange
