#include "base/config.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <nlohmann/json.hpp>
#include <ranges>
#include <sstream>

// A broken file makes some of toml++'s assertions false ("[[["), and with NDEBUG it tells the
// optimiser to assume them. The checks behind them report the error.
#undef NDEBUG
#define TOML_ASSERT(expr) static_cast<void>(0)
#include <toml++/toml.h>

namespace assay {
namespace {

template <class... F>
struct overloaded : F... {
  using F::operator()...;
};

// JSON's strings are TOML's basic strings.
std::string toml_string(const std::string& text) { return nlohmann::json(text).dump(); }
std::string number(double value) {
  std::string text = fmt::format("{}", value);  // the shortest that reads back exactly
  return text.find_first_of(".en") == std::string::npos ? text + ".0" : text;
}

template <class T>
bool assign(const toml::node& node, T& out) {
  if (const auto value = node.value<T>();
      value && (node.is_number() || !std::is_arithmetic_v<T> || node.is_boolean())) {
    if constexpr (std::is_same_v<T, double>) {
      if (!node.is_number()) return false;
    } else if constexpr (std::is_same_v<T, int64_t>) {
      if (!node.is_integer()) return false;
    } else if constexpr (std::is_same_v<T, bool>) {
      if (!node.is_boolean()) return false;
    }
    out = *value;
    return true;
  }
  return false;
}
template <class T>
bool assign(const toml::node& node, std::vector<T>& out) {
  if (!node.is_array()) return false;
  std::vector<T> values;
  for (const toml::node& element : *node.as_array())
    if (!assign(element, values.emplace_back())) return false;
  out = std::move(values);
  return true;
}

void merge_into(toml::table& base, const toml::table& over) {
  for (const auto& [key, node] : over) {
    toml::node* old = base.get(key);
    if (old && old->is_table() && node.is_table()) merge_into(*old->as_table(), *node.as_table());
    else base.insert_or_assign(key, node);
  }
}

// toml++ recurses along dotted keys without a limit, and a bare key with bytes outside ASCII, which
// TOML forbids, reaches code of toml++ that its authors declared unreachable. Both are refused here
// before toml++ sees them.
class KeyScanner {
 public:
  KeyScanner(std::string_view text, const std::string& source) : text_(text), source_(source) {}

  void check() {
    if (text_.starts_with("\xef\xbb\xbf")) at_ = 3;  // a byte order mark
    while (at_ < text_.size()) step();
  }

 private:
  static constexpr int kDeepest = 16;

  void step() {
    const char c = text_[at_];
    if (c == '#') return skip_comment();
    if (c == '"' || c == '\'') return skip_string(c);
    if (static_cast<unsigned char>(c) >= 0x80)
      refuse("a character outside ASCII is allowed in strings and comments only");
    if (c == '.') ++dots_;
    if (std::string_view("\n=[]{},").find(c) != std::string_view::npos) dots_ = 0;
    if (dots_ > kDeepest) refuse(fmt::format("a key has more than {} parts", kDeepest));
    ++at_;
  }
  void skip_comment() { at_ = std::min(text_.find('\n', at_), text_.size()); }
  // To the end of a string, or of the text when the string has none; toml++ reports that.
  void skip_string(char quote) {
    const std::string triple(3, quote);
    const bool multi_line = text_.substr(at_).starts_with(triple);
    const std::string end = multi_line ? triple : std::string(1, quote);
    at_ += end.size();
    while (at_ < text_.size() && !text_.substr(at_).starts_with(end)) {
      if (!multi_line && text_[at_] == '\n') return;
      at_ += quote == '"' && text_[at_] == '\\' ? 2 : 1;
    }
    at_ = std::min(at_ + end.size(), text_.size());
  }
  [[noreturn]] void refuse(const std::string& what) const {
    const std::string_view before = text_.substr(0, at_);
    const size_t line = size_t(std::ranges::count(before, '\n')) + 1;
    const size_t line_begin = before.rfind('\n') + 1;  // npos + 1 is 0
    fail("{}:{}:{}: {}. Nothing was changed.", source_, line, at_ - line_begin + 1, what);
  }

  std::string_view text_;
  const std::string& source_;
  size_t at_ = 0;
  int dots_ = 0;
};

toml::table parse_toml(std::string_view text, const std::string& source) {
  KeyScanner(text, source).check();
  return toml::parse(text, source);
}

std::string describe(const Fields& fields) {
  std::vector<std::string> words;
  for (const Field& field : fields)
    words.push_back(fmt::format("{} ({})", field.name, field.type()));
  return join(words);
}

}  // namespace

ConfigError::ConfigError(const std::string& where, std::string table, std::string key,
                         std::string problem)
    : BadInput(describe_problem(where, problem, table, "Nothing was changed.")),
      table(std::move(table)),
      key(std::move(key)),
      problem(std::move(problem)) {}

std::string describe_problem(const std::string& where, std::string problem,
                             const std::string& table, const std::string& ending) {
  constexpr std::string_view kMark = "{table}";
  const std::string name = table.empty() ? "the top level" : table;
  for (size_t at = 0; (at = problem.find(kMark, at)) != std::string::npos; at += name.size())
    problem.replace(at, kMark.size(), name);
  return fmt::format("{}: {}{} {}", where, problem, problem.ends_with('.') ? "" : ".", ending);
}

std::string Field::type() const {
  return std::visit<std::string>(
      overloaded{[](bool*) { return "true or false"; }, [](int64_t*) { return "integer"; },
                 [](double*) { return "number"; }, [](std::string*) { return "string"; },
                 [](std::vector<std::string>*) { return "list of strings"; },
                 [](std::vector<int64_t>*) { return "list of integers"; },
                 [](std::vector<double>*) { return "list of numbers"; }},
      value);
}

std::string Field::toml() const {
  const auto list = [](const auto& values, auto&& show) {
    std::vector<std::string> words;
    for (const auto& v : values) words.push_back(show(v));
    return "[" + join(words) + "]";
  };
  return std::visit<std::string>(
      overloaded{[](bool* v) -> std::string { return *v ? "true" : "false"; },
                 [](int64_t* v) { return std::to_string(*v); },
                 [](double* v) { return number(*v); },
                 [](std::string* v) { return toml_string(*v); },
                 [&](std::vector<std::string>* v) { return list(*v, toml_string); },
                 [&](std::vector<int64_t>* v) {
                   return list(*v, [](int64_t i) { return std::to_string(i); });
                 },
                 [&](std::vector<double>* v) { return list(*v, number); }},
      value);
}

std::string to_toml(const Fields& fields) {
  std::string out;
  for (const Field& field : fields) out += field.name + " = " + field.toml() + "\n";
  return out;
}

struct ConfigNode::Document {
  toml::table root;
  std::string source;
  std::vector<std::string> assignments;  // "train.steps=100", as set() took them
  // Where values and tables were written that come from other documents, by path from the root.
  std::map<std::string, std::string> places;
};

namespace {
toml::table* as_table(void* table) { return static_cast<toml::table*>(table); }
std::string toml_key(const std::string& key) {
  const auto is_bare = [](unsigned char c) { return std::isalnum(c) || c == '_' || c == '-'; };
  return !key.empty() && std::ranges::all_of(key, is_bare) ? key : toml_string(key);
}
// On one line.
std::string toml_text(const toml::node& node) {
  std::vector<std::string> parts;
  if (const toml::array* array = node.as_array()) {
    for (const toml::node& element : *array) parts.push_back(toml_text(element));
    return fmt::format("[{}]", join(parts));
  }
  if (const toml::table* table = node.as_table()) {
    for (const auto& [key, value] : *table)
      parts.push_back(fmt::format("{} = {}", toml_key(std::string(key.str())), toml_text(value)));
    return fmt::format("{{{}}}", join(parts));
  }
  if (const auto text = node.value_exact<std::string>()) return toml_string(*text);
  if (const auto value = node.value_exact<double>()) return number(*value);
  std::ostringstream out;
  node.visit([&](const auto& value) { out << value; });
  return out.str();
}
std::string position(const std::string& source, const toml::source_region& region) {
  return region.begin ? fmt::format("{}:{}:{}", source, region.begin.line, region.begin.column)
                      : source;
}
std::string path_of(const std::string& table, const std::string& key) {
  return table.empty() ? key : table + "." + key;
}
}  // namespace

ConfigNode::ConfigNode(std::shared_ptr<Document> document, void* table, std::string name)
    : document_(std::move(document)), table_(table), name_(std::move(name)) {}

ConfigNode ConfigNode::parse(std::string_view text, const std::string& source) {
  auto document = std::make_shared<Document>();
  document->source = source;
  try {
    document->root = parse_toml(text, source);
  } catch (const toml::parse_error& error) {
    fail("{}: {}. Nothing was changed.", position(source, error.source()), error.description());
  }
  toml::table* root = &document->root;
  return ConfigNode(std::move(document), root, "");
}

ConfigNode ConfigNode::read_file(const std::filesystem::path& file) {
  const auto check = [&](bool good) {
    if (good) return;
    fail("{}: cannot be read as a TOML file ({})", file.string(),
         std::filesystem::exists(file) ? "not a readable, non-empty file" : "no such file");
  };
  std::error_code ignored;
  check(std::filesystem::is_regular_file(file, ignored));  // a FIFO would wait for ever
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  check(in && text << in.rdbuf());
  return parse(text.str(), file.string());
}

void ConfigNode::set(std::string_view assignment) {
  const size_t equals = assignment.find('=');
  if (equals == std::string_view::npos || equals == 0)
    fail("--set {}: expected KEY=VALUE, for example train.steps=100", assignment);
  const std::string key(assignment.substr(0, equals)), value(assignment.substr(equals + 1));
  const std::string source = fmt::format("--set {:.60}", assignment);
  toml::table parsed;
  try {
    parsed = parse_toml(fmt::format("{} = {}", key, value), source);
  } catch (const std::runtime_error&) {  // a bare word is a string
    try {
      parsed = parse_toml(fmt::format("{} = {}", key, toml_string(value)), source);
    } catch (const toml::parse_error& error) {
      fail("--set {}: {}", assignment, error.description());
    }
  }
  merge_into(*as_table(table_), parsed);
  document_->assignments.emplace_back(assignment);
}

bool ConfigNode::has(const std::string& key) const {
  return table_ && as_table(table_)->contains(key);
}
bool ConfigNode::is_table(const std::string& key) const {
  return has(key) && as_table(table_)->get(key)->is_table();
}

std::vector<std::string> ConfigNode::keys() const {
  std::vector<std::string> out;
  if (table_)
    for (const auto& [key, node] : *as_table(table_)) out.emplace_back(key.str());
  return out;
}

std::string ConfigNode::value(const std::string& key) const {
  if (!has(key)) return "";
  const toml::node* node = as_table(table_)->get(key);
  if (const toml::array* array = node->as_array()) {
    std::vector<std::string> words;  // toml++ breaks long arrays into lines
    for (const toml::node& element : *array) words.push_back(toml_text(element));
    return "[" + join(words) + "]";
  }
  return toml_text(*node);
}

std::string ConfigNode::where(const std::string& key) const {
  const std::string path = path_of(name_, key), assigned = path + "=";
  for (const std::string& assignment : document_->assignments | std::views::reverse)
    if (assignment.starts_with(assigned)) return "--set " + assignment;
  if (const auto place = document_->places.find(path); place != document_->places.end())
    return place->second;
  if (!has(key)) return document_->source;
  return position(document_->source, as_table(table_)->get(key)->source());
}

ConfigNode ConfigNode::child(const std::string& key) const {
  const std::string name = path_of(name_, key);
  if (!has(key)) return ConfigNode(document_, nullptr, name);
  toml::node* node = as_table(table_)->get(key);
  if (!node->is_table()) refuse(key, fmt::format("'{}' in {{table}} must be a table", key));
  return ConfigNode(document_, node->as_table(), name);
}

void ConfigNode::refuse(const std::string& key, const std::string& problem) const {
  throw ConfigError(where(key), name_, key, problem);
}

void ConfigNode::read(const Fields& fields, const std::vector<std::string>& also) const {
  if (!table_) return;
  for (const auto& [key_view, node] : *as_table(table_)) {
    const std::string key(key_view.str());
    const auto field = std::ranges::find(fields, key, &Field::name);
    if (field == fields.end()) {
      if (std::ranges::find(also, key) != also.end()) continue;
      std::vector<std::string> names = also;
      for (const Field& f : fields) names.push_back(f.name);
      refuse(key, fmt::format("unknown key '{}' in {{table}}{}\n  {{table}} takes {}{}{}", key,
                              did_you_mean(key, names), describe(fields),
                              fields.empty() || also.empty() ? "" : ", ", join(also)));
    }
    if (!std::visit([&](auto* out) { return assign(node, *out); }, field->value))
      refuse(key, fmt::format(
                      "'{}' in {{table}} must be {} {}", key,
                      std::string("aeiou").find(field->type()[0]) == std::string::npos ? "a" : "an",
                      field->type()));
  }
}

ConfigNode ConfigNode::merged(const std::vector<ConfigNode>& layers) {
  ConfigNode out(std::make_shared<Document>(), nullptr, layers.front().name_);
  out.table_ = &out.document_->root;
  out.document_->source = layers.front().document_->source;
  for (const ConfigNode& layer : layers) {
    if (!layer.table_) continue;
    layer.note_places(out.name_, out.document_->places);
    merge_into(out.document_->root, *as_table(layer.table_));
  }
  return out;
}

void ConfigNode::note_places(const std::string& name,
                             std::map<std::string, std::string>& places) const {
  for (const std::string& key : keys()) {
    places[path_of(name, key)] = where(key);
    if (is_table(key)) child(key).note_places(path_of(name, key), places);
  }
}

void ConfigNode::put(const std::string& path, const std::string& toml, const std::string& where) {
  merge_into(*as_table(table_), parse_toml(fmt::format("{} = {}", path, toml), where));
  for (size_t dot = path.find('.'); dot != std::string::npos; dot = path.find('.', dot + 1))
    document_->places.try_emplace(path_of(name_, path.substr(0, dot)), where);
  document_->places[path_of(name_, path)] = where;
}

void ConfigNode::erase(const std::string& key) { as_table(table_)->erase(key); }

void ConfigNode::rename(const std::string& key, const std::string& to) {
  if (!has(key)) return;
  as_table(table_)->insert_or_assign(to, *as_table(table_)->get(key));
  document_->places[path_of(name_, to)] = where(key);
  erase(key);
}

std::string ConfigNode::toml(const std::string& name) const {
  std::string out = fmt::format("[{}]\n", name), tables;
  for (const std::string& key : keys()) {
    if (is_table(key)) tables += child(key).toml(name + "." + toml_key(key));
    else out += fmt::format("{} = {}\n", toml_key(key), value(key));
  }
  return out + tables;
}

}  // namespace assay
