#include "tasks/documents.h"

#include <algorithm>
#include <set>

#include "base/json.h"
#include "base/registry.h"
#include "data/bytes.h"
#include "tasks/text.h"

namespace assay::tasks {
namespace {

constexpr size_t kLongestFile = size_t{1} << 31;

std::string contents_of(const fs::path& file) {
  const auto source = data::open_bytes(file);
  std::string text;
  std::string block(1 << 20, '\0');
  try {
    while (const size_t count = source->read(block.data(), block.size())) {
      text.append(block, 0, count);
      if (text.size() > kLongestFile) fail("more than 2 GiB");
    }
  } catch (const BadInput& error) {
    fail("{}: {}", file.string(), error.what());
  }
  return text;
}

// A Python literal, read by recursive descent.
class PythonParser {
 public:
  explicit PythonParser(const std::string& text) : text_(text) {}
  Json whole() {
    Json value = element(0);
    skip();
    if (at_ < text_.size()) wrong();
    return value;
  }

 private:
  [[noreturn]] void wrong() const {
    fail("not a Python literal at character {}: '{}'", at_, text_.substr(at_, 20));
  }
  void skip() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
  }
  bool take(char c) {
    skip();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  Json element(int depth) {
    if (depth > 32) fail("a Python literal is nested more than 32 deep");
    if (take('[')) return list(depth);
    if (take('{')) return dictionary(depth);
    skip();
    if (at_ < text_.size() && (text_[at_] == '\'' || text_[at_] == '"')) return string();
    return number();
  }
  Json list(int depth) {
    Json out = Json::array();
    while (!take(']')) {
      out.push_back(element(depth + 1));
      if (!take(',') && at_ < text_.size() && text_[at_] != ']') wrong();
      if (at_ >= text_.size()) wrong();
    }
    return out;
  }
  Json dictionary(int depth) {
    Json out = Json::object();
    while (!take('}')) {
      const Json key = element(depth + 1);
      if (!key.is_string() || !take(':')) wrong();
      out[key.get<std::string>()] = element(depth + 1);
      if (!take(',') && at_ < text_.size() && text_[at_] != '}') wrong();
      if (at_ >= text_.size()) wrong();
    }
    return out;
  }
  Json number() {
    size_t used = 0;
    try {
      const int64_t value = std::stoll(text_.substr(at_, 24), &used);
      at_ += used;
      return value;
    } catch (const std::exception&) {
      wrong();
    }
  }
  Json string() {
    const char quote = text_[at_++];
    std::string out;
    for (; at_ < text_.size() && text_[at_] != quote; ++at_) {
      if (text_[at_] != '\\' || at_ + 1 == text_.size()) {
        out += text_[at_];
        continue;
      }
      ++at_;
      out += unescaped(text_, at_);
    }
    if (at_ >= text_.size()) wrong();
    ++at_;
    return out;
  }
  const std::string& text_;
  size_t at_ = 0;
};

std::string text_field(const Json& document, const char* name) {
  if (!document.contains(name) || !document[name].is_string())
    fail("the document has no field '{}' that holds a string", name);
  return document[name].get<std::string>();
}

const Json& list_field(const Json& document, const char* name) {
  if (!document.contains(name) || !document[name].is_array())
    fail("the document has no field '{}' that holds a list", name);
  return document[name];
}

// Deletes every "[…]", the shortest from left to right; a bracket whose end is on
// another line stays.
std::string without_brackets(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const size_t end = text[i] == '[' ? text.find_first_of("]\n", i) : std::string::npos;
    if (end != std::string::npos && text[end] == ']') {
      i = end + 1;
    } else {
      out += text[i++];
    }
  }
  return out;
}

std::string hellaswag_text(const std::string& text) {
  return replace_all(without_brackets(replace_all(strip(text), " [title]", ". ")), "  ", " ");
}

void prepare_hellaswag(Json& document) {
  const std::string context =
      text_field(document, "ctx_a") + " " + capitalize(text_field(document, "ctx_b"));
  document["query"] = hellaswag_text(text_field(document, "activity_label") + ": " + context);
  Json choices = Json::array();
  for (const Json& ending : list_field(document, "endings"))
    choices.push_back(hellaswag_text(ending.get<std::string>()));
  document["choices"] = choices;
}

int64_t letter_index(const Json& problem) {
  const std::string answer = text_field(problem, "answer");
  const Json& options = list_field(problem, "options");
  if (answer.size() != 1 || answer[0] < 'A' || size_t(answer[0] - 'A') >= options.size())
    fail("the answer '{}' is not the letter of an option", answer);
  return answer[0] - 'A';
}

void prepare_race(Json& document) {
  const Json problems = python_literal(text_field(document, "problems"));
  if (!problems.is_array() || problems.empty()) fail("'problems' is not a list of problems");
  std::string text = "Article: " + text_field(document, "article") + "\n\n";
  for (size_t i = 0; i + 1 < problems.size(); ++i) {
    const std::string question = text_field(problems[i], "question");
    const auto answer =
        problems[i]["options"][size_t(letter_index(problems[i]))].get<std::string>();
    text += question.ends_with("  _  .") ? question.substr(0, question.size() - 5) + answer + "\n"
                                         : "Question: " + question + "\nAnswer: " + answer + "\n";
  }
  document["query"] = text + text_field(problems.back(), "question");
  document["choices"] = list_field(problems.back(), "options");
  document["gold"] = letter_index(problems.back());
}

void prepare_wsc273(Json& document) {
  static const std::set<std::string> possessive = {"my", "his", "her", "our", "their"};
  static const std::set<std::string> lowered = {"A",    "An", "The", "She", "He",   "It",
                                                "They", "My", "His", "Her", "Their"};
  const std::string text = replace_all(text_field(document, "text"), "  ", " ");
  const std::u32string points = code_points(text);
  if (!document.contains("pronoun_loc") || !document["pronoun_loc"].is_number_integer())
    fail("the document has no field 'pronoun_loc' that holds an integer");
  const auto place = document["pronoun_loc"].get<int64_t>();
  const int64_t before = place - 2 < 0 ? int64_t(points.size()) + place - 2 : place - 2;
  if (before < 0 || before >= int64_t(points.size()))
    fail("pronoun_loc = {} is outside the text", place);
  Json options = Json::array();
  for (const Json& given : list_field(document, "options")) {
    auto option = given.get<std::string>();
    if (possessive.contains(lower(text_field(document, "pronoun")))) option += "'s";
    const std::string first = split(option, "").empty() ? "" : split(option, "").front();
    if (lowered.contains(first) && points[size_t(before)] != U'.')
      option = replace_all(option, first, lower(first));
    options.push_back(option);
  }
  document["text"] = text;
  document["options"] = options;
}

void prepare_swde(Json& document) {
  document["text"] =
      split(text_field(document, "text"), "Summary of information above...", 1).front();
}

Registry<Preparation> preparations() {
  Registry<Preparation> registry("preparation");
  registry.add("", [](Json&) {});
  registry.add("hellaswag", prepare_hellaswag);
  registry.add("race", prepare_race);
  registry.add("wsc273", prepare_wsc273);
  registry.add("swde", prepare_swde);
  return registry;
}

}  // namespace

fs::path find_documents(const fs::path& folder, const std::string& name) {
  for (const char* ending : {"", ".zst", ".gz"})
    if (const fs::path file = folder / (name + ending); fs::is_regular_file(file)) return file;
  fail(
      "{}: no such file, and neither is there {}.zst or {}.gz. "
      "Give the folder of the data with --data.",
      (folder / name).string(), name, name);
}

std::vector<Json> read_documents(const fs::path& folder, const std::string& name) {
  const fs::path file = find_documents(folder, name);
  const std::string text = contents_of(file);
  std::vector<Json> documents;
  int64_t line = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view row(text.data() + begin, end - begin);
    begin = end + 1;
    ++line;
    if (row.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    Json document = parse_python_json(row, fmt::format("{}:{}", file.string(), line));
    if (!document.is_object()) fail("{}:{}: not a JSON object", file.string(), line);
    documents.push_back(std::move(document));
  }
  if (documents.empty()) fail("{}: holds no documents", file.string());
  return documents;
}

Preparation preparation(const std::string& name) {
  static const Registry<Preparation> registry = preparations();
  return registry.at(name);
}

Json python_literal(const std::string& text) { return PythonParser(text).whole(); }

}  // namespace assay::tasks
