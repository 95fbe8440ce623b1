#include "tasks/template.h"

#include <algorithm>
#include <cctype>
#include <map>

#include "base/error.h"
#include "tasks/text.h"

namespace assay::tasks {
namespace {

using Expression = std::function<Json(const Json&)>;
using Arguments = std::vector<Json>;

constexpr int kDeepest = 64;  // nested expressions

std::string kind_of(const Json& value) {
  return value.is_object() ? "a table" : std::string("a ") + value.type_name();
}

const std::string& string_of(const Json& value, const std::string& what) {
  if (!value.is_string()) fail("{} needs a string, not {}", what, kind_of(value));
  return value.get_ref<const std::string&>();
}

int64_t integer_of(const Json& value, const std::string& what) {
  if (value.is_boolean()) return value.get<bool>();
  if (!value.is_number_integer()) fail("{} needs an integer, not {}", what, kind_of(value));
  return value.get<int64_t>();
}

bool truth(const Json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number()) return value.get<double>() != 0;
  if (value.is_string()) return !value.get_ref<const std::string&>().empty();
  return !value.empty();
}

Json strings(const std::vector<std::string>& values) { return Json(values); }

int64_t size_of(const Json& value) {
  if (value.is_string()) return length(value.get_ref<const std::string&>());
  if (value.is_array() || value.is_object()) return int64_t(value.size());
  fail("length needs a string or a list, not {}", kind_of(value));
}

std::string joined(const Json& list, const std::string& separator) {
  if (!list.is_array()) fail("join needs a list, not {}", kind_of(list));
  std::string out;
  for (size_t i = 0; i < list.size(); ++i) out += (i ? separator : "") + to_text(list[i]);
  return out;
}

// As in Python, where true is 1 and false is 0.
bool equal(const Json& a, const Json& b) {
  if (a.is_boolean() && !b.is_boolean()) return equal(a.get<bool>() ? 1 : 0, b);
  if (b.is_boolean() && !a.is_boolean()) return equal(b, a);
  if (a.is_array() && b.is_array()) return std::ranges::equal(a, b, equal);
  if (!a.is_object() || !b.is_object()) return a == b;
  return a.size() == b.size() && std::ranges::all_of(a.items(), [&](const auto& item) {
           return b.contains(item.key()) && equal(item.value(), b[item.key()]);
         });
}

// a < b of two numbers or two strings.
bool less(const Json& a, const Json& b) {
  const auto number = [](const Json& x) {
    return x.is_boolean() ? Json(x.get<bool>() ? 1 : 0) : x;
  };
  const bool numbers = number(a).is_number() && number(b).is_number();
  if (!numbers && !(a.is_string() && b.is_string()))
    fail("{} and {} have no order", kind_of(a), kind_of(b));
  return number(a) < number(b);
}

int64_t index_in(const Json& container, const Json& wanted) {
  if (container.is_array()) {
    for (size_t i = 0; i < container.size(); ++i)
      if (equal(container[i], wanted)) return int64_t(i);
  } else {
    const std::string& text = string_of(container, "index");
    const size_t found = text.find(string_of(wanted, "index"));
    if (found != std::string::npos) return length(std::string_view(text).substr(0, found));
  }
  fail("index: {} is not in {}", wanted.dump(), container.dump().substr(0, 200));
}

bool contains(const Json& container, const Json& wanted) {
  if (container.is_string())
    return container.get_ref<const std::string&>().find(string_of(wanted, "in")) !=
           std::string::npos;
  if (container.is_object())
    return wanted.is_string() && container.contains(wanted.get<std::string>());
  if (!container.is_array())
    fail("in needs a string, a list or a table, not {}", kind_of(container));
  return std::ranges::any_of(container, [&](const Json& x) { return equal(x, wanted); });
}

Json slice(const Json& value, const Json& from, const Json& to) {
  const int64_t size = size_of(value);
  const auto place = [&](const Json& bound, int64_t absent) {
    if (bound.is_null()) return absent;
    const int64_t index = integer_of(bound, "a slice");
    return std::clamp<int64_t>(index < 0 ? index + size : index, 0, size);
  };
  const int64_t begin = place(from, 0);
  const int64_t end = std::max(begin, place(to, size));
  if (value.is_string()) {
    const std::u32string points = code_points(value.get_ref<const std::string&>());
    return utf8(std::u32string_view(points).substr(size_t(begin), size_t(end - begin)));
  }
  Json out = Json::array();
  for (int64_t i = begin; i < end; ++i) out.push_back(value[size_t(i)]);
  return out;
}

Json field_of(const Json& value, const std::string& name) {
  if (value.is_object() && value.contains(name)) return value[name];
  if (!value.is_object())
    fail("'{}' is looked for in {}, which has no fields", name, kind_of(value));
  std::vector<std::string> names;
  for (const auto& [key, unused] : value.items()) names.push_back(key);
  fail("the document has no field '{}'{}; it has {}", name, did_you_mean(name, names), join(names));
}

Json element_of(const Json& value, const Json& index) {
  if (index.is_string()) return field_of(value, index.get<std::string>());
  const int64_t size = size_of(value);
  const int64_t asked = integer_of(index, "an index");
  const int64_t i = asked < 0 ? asked + size : asked;
  if (i < 0 || i >= size) fail("index {} is outside a value of {} elements", asked, size);
  return value.is_string() ? slice(value, i, i + 1) : value[size_t(i)];
}

const std::string& argument(const Arguments& given, size_t i, const std::string& name) {
  if (i >= given.size()) fail("{} needs {} arguments", name, i + 1);
  return string_of(given[i], name);
}

// The numbers of arguments that a method or filter can have. Python allows some of them more.
struct Arity {
  size_t least;
  size_t most;
};
const std::map<std::string, Arity> kMethods = {
    {"strip", {0, 1}},    {"lstrip", {0, 1}},  {"rstrip", {0, 1}},     {"lower", {0, 0}},
    {"upper", {0, 0}},    {"replace", {2, 3}}, {"capitalize", {0, 0}}, {"startswith", {1, 1}},
    {"endswith", {1, 1}}, {"split", {0, 2}},   {"index", {1, 1}},      {"find", {1, 1}},
    {"count", {1, 1}}};
const std::map<std::string, Arity> kFilters = {
    {"length", {0, 0}}, {"count", {0, 0}}, {"string", {0, 0}},     {"join", {0, 1}},
    {"first", {0, 0}},  {"last", {0, 0}},  {"int", {0, 0}},        {"trim", {0, 1}},
    {"lower", {0, 0}},  {"upper", {0, 0}}, {"capitalize", {0, 0}}, {"replace", {2, 3}}};

void check_call(const std::map<std::string, Arity>& known, const char* kind,
                const std::string& name, const Arguments& given) {
  const auto found = known.find(name);
  if (found == known.end()) {
    std::vector<std::string> names;
    for (const auto& [each, arity] : known) names.push_back(each);
    fail("there is no {} '{}'{}; there are {}", kind, name, did_you_mean(name, names), join(names));
  }
  const auto [least, most] = found->second;
  if (given.size() < least || given.size() > most)
    fail("the {} '{}' takes {} arguments here, not {}", kind, name,
         least == most ? fmt::format("{}", least) : fmt::format("{} to {}", least, most),
         given.size());
}

// A method of a string or, for index, of a list.
Json call(const std::string& name, const Json& self, const Arguments& given) {
  const auto text = [&]() -> const std::string& { return string_of(self, name); };
  if (name == "strip" || name == "lstrip" || name == "rstrip" || name == "trim") {
    const bool left = name != "rstrip";
    const bool right = name != "lstrip";
    return given.empty() ? strip(text(), left, right)
                         : strip_characters(text(), argument(given, 0, name), left, right);
  }
  if (name == "lower") return lower(text());
  if (name == "upper") return upper(text());
  if (name == "capitalize") return capitalize(text());
  if (name == "replace") {
    if (argument(given, 0, name).empty()) fail("replace needs a text to replace");
    return replace_all(text(), argument(given, 0, name), argument(given, 1, name),
                       given.size() > 2 ? integer_of(given[2], name) : -1);
  }
  if (name == "startswith") return text().starts_with(argument(given, 0, name));
  if (name == "endswith") return text().ends_with(argument(given, 0, name));
  if (name == "split" && !given.empty() && argument(given, 0, name).empty())
    fail("split needs a separator");
  if (name == "split")
    return strings(split(text(), given.empty() ? std::string() : argument(given, 0, name),
                         given.size() > 1 ? integer_of(given[1], name) : -1));
  if (name == "index") return index_in(self, given[0]);
  if (name == "find") {
    const bool found = text().find(argument(given, 0, name)) != std::string::npos;
    return found ? index_in(self, given[0]) : -1;
  }
  const std::string& wanted = argument(given, 0, name);  // count
  return wanted.empty() ? size_of(self) + 1 : int64_t(split(text(), wanted).size()) - 1;
}

Json filter(const std::string& name, const Json& self, const Arguments& given) {
  check_call(kFilters, "filter", name, given);
  if (name == "length" || name == "count") return size_of(self);
  if (name == "string") return to_text(self);
  if (name == "join") return joined(self, given.empty() ? std::string() : argument(given, 0, name));
  if (name == "first") return element_of(self, 0);
  if (name == "last") return element_of(self, -1);
  if (name == "int") {
    if (!self.is_string())
      return self.is_number_float() ? int64_t(self.get<double>()) : integer_of(self, name);
    const std::string digits = strip(self.get_ref<const std::string&>());
    size_t used = 0;
    try {
      const int64_t number = std::stoll(digits, &used);
      if (used == digits.size()) return number;
    } catch (const std::exception&) {  // reported below
    }
    fail("int: '{}' is not an integer", digits);
  }
  return call(name, self, given);
}

Json add(const Json& a, const Json& b) {
  if (a.is_string() && b.is_string()) return a.get<std::string>() + b.get<std::string>();
  if (a.is_array() && b.is_array()) {
    Json out = a;
    for (const Json& element : b) out.push_back(element);
    return out;
  }
  return integer_of(a, "+") + integer_of(b, "+");
}

// Recursive descent over one expression. The parts become closures.
class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Expression whole() {
    Expression value = conditional();
    skip();
    if (at_ < text_.size()) fail("'{}' is not understood", text_.substr(at_));
    return value;
  }

 private:
  struct Deeper {
    explicit Deeper(int& depth) : depth_(depth) {
      if (++depth_ > kDeepest) fail("expressions are nested more than {} deep", kDeepest);
    }
    ~Deeper() { --depth_; }
    int& depth_;
  };

  void skip() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
  }
  bool take(std::string_view token) {
    skip();
    if (!text_.substr(at_).starts_with(token)) return false;
    at_ += token.size();
    return true;
  }
  static bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }
  bool take_word(std::string_view word) {
    skip();
    const size_t end = at_ + word.size();
    if (!text_.substr(at_).starts_with(word) || (end < text_.size() && is_name(text_[end])))
      return false;
    at_ = end;
    return true;
  }
  std::string name() {
    skip();
    const size_t begin = at_;
    while (at_ < text_.size() && is_name(text_[at_])) ++at_;
    if (begin == at_) fail("a name is expected at '{}'", text_.substr(begin));
    return std::string(text_.substr(begin, at_ - begin));
  }
  void expect(std::string_view token) {
    if (!take(token)) fail("'{}' is expected at '{}'", token, text_.substr(at_));
  }

  Expression conditional() {
    const Deeper deeper(depth_);
    Expression value = any();
    if (!take_word("if")) return value;
    Expression condition = any();
    if (!take_word("else")) fail("an expression with 'if' needs 'else'");
    return [value, condition, other = conditional()](const Json& d) {
      return truth(condition(d)) ? value(d) : other(d);
    };
  }
  Expression any() {
    Expression left = all();
    while (take_word("or"))
      left = [left, right = all()](const Json& d) {
        const Json value = left(d);
        return truth(value) ? value : right(d);
      };
    return left;
  }
  Expression all() {
    Expression left = negation();
    while (take_word("and"))
      left = [left, right = negation()](const Json& d) {
        const Json value = left(d);
        return truth(value) ? right(d) : value;
      };
    return left;
  }
  Expression negation() {
    const Deeper deeper(depth_);
    if (take_word("not"))
      return [value = negation()](const Json& d) { return Json(!truth(value(d))); };
    return comparison();
  }
  using Relation = bool (*)(const Json&, const Json&);
  // The relation that comes next in the text; null without one.
  Relation relation() {
    if (take_word("in")) return [](const Json& a, const Json& b) { return contains(b, a); };
    if (take_word("not")) {
      if (!take_word("in")) fail("'in' is expected after 'not'");
      return [](const Json& a, const Json& b) { return !contains(b, a); };
    }
    if (take("==")) return equal;
    if (take("!=")) return [](const Json& a, const Json& b) { return !equal(a, b); };
    if (take("<=")) return [](const Json& a, const Json& b) { return !less(b, a); };
    if (take(">=")) return [](const Json& a, const Json& b) { return !less(a, b); };
    if (take("<")) return less;
    if (take(">")) return [](const Json& a, const Json& b) { return less(b, a); };
    return nullptr;
  }
  // a < b < c means a < b and b < c.
  Expression comparison() {
    const Expression first = sum();
    std::vector<std::pair<Relation, Expression>> rest;
    while (const Relation holds = relation()) rest.emplace_back(holds, sum());
    if (rest.empty()) return first;
    return [first, rest](const Json& d) {
      Json left = first(d);
      for (const auto& [holds, expression] : rest) {
        Json right = expression(d);
        if (!holds(left, right)) return Json(false);
        left = std::move(right);
      }
      return Json(true);
    };
  }
  Expression sum() {
    Expression left = concatenation();
    while (true) {
      if (take("+"))
        left = [left, right = concatenation()](const Json& d) { return add(left(d), right(d)); };
      else if (take("-"))
        left = [left, right = concatenation()](const Json& d) {
          return Json(integer_of(left(d), "-") - integer_of(right(d), "-"));
        };
      else return left;
    }
  }
  Expression concatenation() {
    Expression left = product();
    while (take("~"))
      left = [left, right = product()](const Json& d) {
        return Json(to_text(left(d)) + to_text(right(d)));
      };
    return left;
  }
  Expression product() {
    Expression left = filtered();
    while (take("*"))
      left = [left, right = filtered()](const Json& d) {
        return Json(integer_of(left(d), "*") * integer_of(right(d), "*"));
      };
    return left;
  }
  Expression filtered() {
    Expression value = postfix();
    while (take("|")) {
      const std::string filter_name = name();
      const std::vector<Expression> given = take("(") ? arguments(")") : std::vector<Expression>();
      value = [value, filter_name, given](const Json& d) {
        return filter(filter_name, value(d), evaluated(given, d));
      };
    }
    return value;
  }
  Expression postfix() {
    if (take("-")) {
      const Deeper deeper(depth_);
      return [value = postfix()](const Json& d) { return Json(-integer_of(value(d), "-")); };
    }
    Expression value = primary();
    while (true) {
      if (take(".")) {
        const std::string member = name();
        if (take("(")) {
          value = [value, member, given = arguments(")")](const Json& d) {
            const Arguments values = evaluated(given, d);
            check_call(kMethods, "method", member, values);
            return call(member, value(d), values);
          };
        } else {
          value = [value, member](const Json& d) { return field_of(value(d), member); };
        }
      } else if (take("[")) {
        value = subscript(value);
      } else {
        return value;
      }
    }
  }
  Expression subscript(const Expression& value) {
    const Expression nothing = [](const Json&) { return Json(); };
    skip();
    const bool open_begin = at_ < text_.size() && text_[at_] == ':';
    const Expression first = open_begin ? nothing : conditional();
    if (!take(":")) {
      expect("]");
      return [value, first](const Json& d) { return element_of(value(d), first(d)); };
    }
    skip();
    const bool open_end = at_ < text_.size() && text_[at_] == ']';
    const Expression last = open_end ? nothing : conditional();
    expect("]");
    return [value, first, last](const Json& d) { return slice(value(d), first(d), last(d)); };
  }
  Expression primary() {
    const Deeper deeper(depth_);
    skip();
    if (at_ >= text_.size()) fail("the expression ends too early");
    const char c = text_[at_];
    if (c == '"' || c == '\'') return constant(quoted(c));
    if (std::isdigit(static_cast<unsigned char>(c))) return constant(number());
    if (take("(")) {
      Expression value = conditional();
      expect(")");
      return value;
    }
    if (take("["))
      return [elements = arguments("]")](const Json& d) { return Json(evaluated(elements, d)); };
    const std::string word = name();
    if (word == "true" || word == "True") return constant(true);
    if (word == "false" || word == "False") return constant(false);
    return [word](const Json& d) { return field_of(d, word); };
  }
  std::vector<Expression> arguments(std::string_view close) {
    std::vector<Expression> given;
    if (take(close)) return given;
    do given.push_back(conditional());
    while (take(","));
    expect(close);
    return given;
  }
  static Arguments evaluated(const std::vector<Expression>& expressions, const Json& document) {
    Arguments values;
    for (const Expression& expression : expressions) values.push_back(expression(document));
    return values;
  }
  static Expression constant(Json value) {
    return [value = std::move(value)](const Json&) { return value; };
  }
  Json number() {
    const size_t begin = at_;
    while (at_ < text_.size() && std::isdigit(static_cast<unsigned char>(text_[at_]))) ++at_;
    if (at_ - begin > 18) fail("the number {} is too large", text_.substr(begin, at_ - begin));
    return std::stoll(std::string(text_.substr(begin, at_ - begin)));
  }
  Json quoted(char quote) {
    std::string out;
    for (++at_; at_ < text_.size() && text_[at_] != quote; ++at_) {
      if (text_[at_] != '\\' || at_ + 1 == text_.size()) {
        out += text_[at_];
        continue;
      }
      out += unescaped(text_, ++at_);
    }
    if (at_ >= text_.size()) fail("a string has no end");
    ++at_;
    return out;
  }

  std::string_view text_;
  size_t at_ = 0;
  int depth_ = 0;
};

// The end of the expression that begins at `from`: the "}}" outside of strings.
size_t end_of_expression(std::string_view source, size_t from) {
  char quote = 0;
  for (size_t i = from; i < source.size(); ++i) {
    if (quote) {
      if (source[i] == '\\') ++i;
      else if (source[i] == quote) quote = 0;
    } else if (source[i] == '"' || source[i] == '\'') {
      quote = source[i];
    } else if (source.substr(i).starts_with("}}")) {
      return i;
    }
  }
  fail("'{{{{' has no matching '}}}}'");
}

}  // namespace

std::string to_text(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "True" : "False";
  if (value.is_null()) return "None";
  if (value.is_number_float()) {
    const std::string digits = fmt::format("{}", value.get<double>());
    return digits.find_first_not_of("-0123456789") == std::string::npos ? digits + ".0" : digits;
  }
  if (value.is_number()) return value.dump();
  // The order of the fields is not kept
  if (value.size() > 1 && value.is_object()) fail("a table of several fields cannot be printed");
  const auto shown = [](const Json& x) {
    return x.is_string() ? python_quoted(x.get_ref<const std::string&>()) : to_text(x);
  };
  std::vector<std::string> parts;
  for (const auto& [key, element] : value.items())
    parts.push_back((value.is_object() ? python_quoted(key) + ": " : "") + shown(element));
  return fmt::format("{}{}{}", value.is_object() ? '{' : '[', join(parts),
                     value.is_object() ? '}' : ']');
}

Template::Template(const std::string& source, std::string where) : where_(std::move(where)) {
  try {
    for (size_t at = 0; at < source.size();) {
      const size_t begin = std::min(source.find("{{", at), source.size());
      const std::string_view text(source.data() + at, begin - at);
      if (text.find("{%") != text.npos)
        fail("statements in {{% %}} are not supported; use expressions in {{{{ }}}}");
      if (text.find("{#") != text.npos) fail("comments in {{# #}} are not supported");
      const std::string_view sign =
          std::string_view(source).substr(std::min(begin + 2, source.size()), 1);
      if (begin < source.size() && (sign == "-" || sign == "+"))
        fail(
            "control of white space ('{{{{{}') is not supported; "
            "a number needs a space before its sign",
            sign);
      if (begin > at) pieces_.push_back({source.substr(at, begin - at), {}});
      if (begin == source.size()) break;
      const size_t end = end_of_expression(source, begin + 2);
      pieces_.push_back(
          {"", Parser(std::string_view(source).substr(begin + 2, end - begin - 2)).whole()});
      at = end + 2;
    }
  } catch (const BadInput& error) {
    fail("{}: {}. Nothing was run.", where_, error.what());
  }
}

Json Template::value(const Json& document) const {
  try {
    if (pieces_.size() == 1 && pieces_[0].expression) return pieces_[0].expression(document);
    std::string out;
    for (const Piece& piece : pieces_)
      out += piece.expression ? to_text(piece.expression(document)) : piece.text;
    return out;
  } catch (const BadInput& error) {
    fail("{}: {}", where_, error.what());
  }
}

std::string Template::render(const Json& document) const { return to_text(value(document)); }

}  // namespace assay::tasks
