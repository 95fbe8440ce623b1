// Generation: the greedy text after a prompt, compared with accepted answers.
//   contains     any answer occurs in the text, case ignored
//   exact_match  the text equals any answer, by the rules of the fields ignore_*
// Long documents may be cut to a window around the answer first, as "Just read twice" [Arora et al.
// 2024] does: of cut_tokens tokens, half before the answer and the others from the answer on; the
// first ones of the text where no answer is looked for. The window is not moved where the text ends
// early. An answer that is not found counts as at the end of the text.
#include <algorithm>

#include "tasks/kind.h"
#include "tasks/matching.h"
#include "tasks/text.h"

namespace assay::tasks {
namespace {

class Generate final : public Kind {
 public:
  Fields fields() override { return fields_of(config_); }
  void complete(const ConfigNode& file, const TaskConfig& task) override {
    text_ = template_of(file, "text", config_.text);
    answers_ = template_of(file, "answers", config_.answers);
    delimiter_ = task.target_delimiter;
    if (config_.max_tokens < 1)
      fail("{}: max_tokens must be positive. Nothing was run.", file.where("max_tokens"));
    for (const std::string& answer : config_.cut_at)
      cut_at_.push_back(template_of(file, "cut_at", answer));
    ending_ = template_of(file, "remove_ending", config_.remove_ending, /*required=*/false);
    const bool cuts = config_.cut_tokens > 0;
    if (config_.cut_tokens < 0 || cuts != !config_.cut_field.empty())
      fail("{}: cut_field and cut_tokens (positive) belong together. Nothing was run.",
           file.where("cut_tokens"));
    if (config_.cut_rule != "earliest" && config_.cut_rule != "first")
      fail("{}: cut_rule must be earliest or first. Nothing was run.", file.where("cut_rule"));
    rule_ = {config_.ignore_words, config_.ignore_case, config_.ignore_punctuation};
  }
  std::vector<std::string> metrics() const override { return {"contains", "exact_match"}; }
  Generation generation() const override { return {config_.until, config_.max_tokens}; }
  std::string example(const Json& document) const override {
    return text_.render(document) + delimiter_ + accepted(document).front();
  }
  Asked ask(const Json& document, const std::string& before, Encoder& encoder) const override {
    accepted(document);
    Asked asked;
    asked.prompt = before + text_.render(cut(document, encoder));
    return asked;
  }
  bool skipped(const Json& document) const override {
    return std::ranges::any_of(
        cut_at_, [&](const Template& answer) { return length(answer.render(document)) <= 1; });
  }
  Scores score(const Json& document, const Answer& answer) const override {
    const std::string text = config_.strip ? strip(answer.generated) : answer.generated;
    const auto answers = accepted(document);
    const auto any = [&](auto&& matches) { return double(std::ranges::any_of(answers, matches)); };
    return {
        {"metrics",
         {{"contains", any([&](const std::string& right) { return contains_text(text, right); })},
          {"exact_match",
           any([&](const std::string& right) { return exact_match(text, right, rule_); })}}},
        {"prediction", text},
        {"gold", answers}};
  }

 private:
  struct Config {
    std::string text;
    std::string answers;
    std::vector<std::string> until = {"\n"};
    std::vector<std::string> ignore_words;
    int64_t max_tokens = 256;
    std::string cut_field;
    std::string cut_rule = "earliest";
    std::string remove_ending;
    std::vector<std::string> cut_at;
    int64_t cut_tokens = 0;
    bool strip = true;
    bool ignore_case = false;
    bool ignore_punctuation = false;
    void fields(auto&& field) {
      field("text", text, "template of the prompt");
      field("answers", answers, "template of the accepted answer, or of the list of them");
      field("until", until, "the text ends before the first of these");
      field("max_tokens", max_tokens, "tokens generated at most");
      field("strip", strip, "white space at both ends of the text is removed");
      field("ignore_words", ignore_words,
            "exact_match: deleted where they begin at the edge of a word");
      field("ignore_case", ignore_case, "exact_match: letters are compared in lower case");
      field("ignore_punctuation", ignore_punctuation, "exact_match: ASCII punctuation is deleted");
      field("cut_field", cut_field, "field of the document that is cut to a window");
      field("cut_tokens", cut_tokens, "tokens of the window; 0: nothing is cut");
      field("cut_at", cut_at,
            "templates of texts around one of which the window lies; none: the first tokens");
      field("cut_rule", cut_rule,
            "earliest: the text that occurs first; first: the first of the list that occurs");
      field("remove_ending", remove_ending,
            "template: removed from the end of the window, case ignored, repeatedly");
    }
  };
  std::vector<std::string> accepted(const Json& document) const {
    const Json value = answers_.value(document);
    return value.is_array() ? strings_of(value, "answers") : std::vector{to_text(value)};
  }

  // The place in `text` around which the window lies, in bytes.
  size_t centre(const std::string& text, const Json& document) const {
    if (cut_at_.empty()) return 0;
    size_t place = std::string::npos;
    for (const Template& answer : cut_at_) {
      const size_t found = text.find(answer.render(document));
      if (config_.cut_rule == "first" && place != std::string::npos) break;
      place = std::min(place, found);
    }
    return std::min(place, text.size());
  }
  Json cut(const Json& document, Encoder& encoder) const {
    if (config_.cut_tokens == 0) return document;
    Json out = document;
    if (!document.contains(config_.cut_field) || !document[config_.cut_field].is_string())
      fail("the document has no field '{}' that holds a string", config_.cut_field);
    auto text = document[config_.cut_field].get<std::string>();
    const std::vector<int64_t> ids = encoder.encode(text);
    const auto place = int64_t(encoder.encode(text.substr(0, centre(text, document))).size());
    const int64_t before = std::min(place, config_.cut_tokens / 2);
    const int64_t begin = std::min(place - before, int64_t(ids.size()));
    const int64_t end = std::min(int64_t(ids.size()), begin + config_.cut_tokens);
    text = encoder.decode({ids.begin() + begin, ids.begin() + end});
    const std::string ending = lower(ending_.render(document));
    while (!ending.empty() && lower(text).ends_with(ending))
      text = text.substr(0, text.size() - ending.size());
    out[config_.cut_field] = text;
    return out;
  }

  Config config_;
  Template text_;
  Template answers_;
  Template ending_;
  std::vector<Template> cut_at_;
  std::string delimiter_;
  ExactMatch rule_;
};

const RegisterKind<Generate> registered(
    "generate", "the greedy text after a prompt, compared with accepted answers");

}  // namespace
}  // namespace assay::tasks
