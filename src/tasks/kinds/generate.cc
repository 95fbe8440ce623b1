// Generation: the greedy text after a prompt, compared with accepted answers.
//   contains     any answer occurs in the text, case ignored
//   exact_match  the text equals any answer, by the rules of the fields ignore_*
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
    if (config_.max_tokens < 1) fail("{}: max_tokens must be positive. Nothing was run.", file.where("max_tokens"));
    rule_ = {config_.ignore_words, config_.ignore_case, config_.ignore_punctuation};
  }
  std::vector<std::string> metrics() const override { return {"contains", "exact_match"}; }
  Generation generation() const override { return {config_.until, config_.max_tokens}; }
  std::string example(const Json& document) const override {
    return text_.render(document) + delimiter_ + accepted(document).front();
  }
  Asked ask(const Json& document, const std::string& before, Encoder&) const override {
    accepted(document);
    Asked asked;
    asked.prompt = before + text_.render(document);
    return asked;
  }
  Scores score(const Json& document, const Answer& answer) const override {
    const std::string text = config_.strip ? strip(answer.generated) : answer.generated;
    const auto answers = accepted(document);
    const auto any = [&](auto&& matches) { return double(std::ranges::any_of(answers, matches)); };
    return {{"metrics",
             {{"contains", any([&](const std::string& right) { return contains_text(text, right); })},
              {"exact_match", any([&](const std::string& right) { return exact_match(text, right, rule_); })}}},
            {"prediction", text},
            {"gold", answers}};
  }

 private:
  struct Config {
    std::string text, answers;
    std::vector<std::string> until = {"\n"}, ignore_words;
    int64_t max_tokens = 256;
    bool strip = true, ignore_case = false, ignore_punctuation = false;
    void fields(auto&& field) {
      field("text", text, "template of the prompt");
      field("answers", answers, "template of the accepted answer, or of the list of them");
      field("until", until, "the text ends before the first of these");
      field("max_tokens", max_tokens, "tokens generated at most");
      field("strip", strip, "white space at both ends of the text is removed");
      field("ignore_words", ignore_words, "exact_match: deleted where they begin at the edge of a word");
      field("ignore_case", ignore_case, "exact_match: letters are compared in lower case");
      field("ignore_punctuation", ignore_punctuation, "exact_match: ASCII punctuation is deleted");
    }
  };
  std::vector<std::string> accepted(const Json& document) const {
    const Json value = answers_.value(document);
    return value.is_array() ? strings_of(value, "answers") : std::vector{to_text(value)};
  }

  Config config_;
  Template text_, answers_;
  std::string delimiter_;
  ExactMatch rule_;
};

const RegisterKind<Generate> registered("generate", "the greedy text after a prompt, compared with accepted answers");

}  // namespace
}  // namespace assay::tasks
