// Multiple choice: each choice is a continuation of the same context.
//   acc        the right choice has the largest log-likelihood
//   acc_norm   …
//       the largest log-likelihood per character (code point) of the choice
//   acc_bytes  …                     the largest log-likelihood per UTF-8 byte of the choice
// The delimiter before the choice counts in its log-likelihood, and not in its length.
#include "tasks/kind.h"
#include "tasks/text.h"

namespace assay::tasks {
namespace {

class MultipleChoice final : public Kind {
 public:
  Fields fields() override { return fields_of(config_); }
  void complete(const ConfigNode& file, const TaskConfig& task) override {
    text_ = template_of(file, "text", config_.text);
    choices_ = template_of(file, "choices", config_.choices);
    answer_ = template_of(file, "answer", config_.answer);
    delimiter_ = task.target_delimiter;
  }
  std::vector<std::string> metrics() const override { return {"acc", "acc_norm", "acc_bytes"}; }
  std::string example(const Json& document) const override {
    const auto choices = strings_of(choices_.value(document), "choices");
    return text_.render(document) + delimiter_ +
           choices[size_t(index_of_answer(answer_.value(document), choices))];
  }
  Asked ask(const Json& document, const std::string& before, Encoder&) const override {
    const auto choices = strings_of(choices_.value(document), "choices");
    index_of_answer(answer_.value(document), choices);  // refused before the model runs
    const std::string context = before + text_.render(document);
    Asked asked;
    for (const std::string& choice : choices)
      asked.continuations.push_back({context, delimiter_ + choice});
    return asked;
  }
  Scores score(const Json& document, const Answer& answer) const override {
    const auto choices = strings_of(choices_.value(document), "choices");
    const auto gold = size_t(index_of_answer(answer_.value(document), choices));
    std::vector<double> plain;
    std::vector<double> by_character;
    std::vector<double> by_byte;
    for (size_t i = 0; i < choices.size(); ++i) {
      const double logprob = answer.likelihoods[i].logprob;
      plain.push_back(logprob);
      by_character.push_back(logprob / double(length(choices[i])));
      by_byte.push_back(logprob / double(choices[i].size()));
    }
    const auto right = [&](const std::vector<double>& scores) {
      return double(largest(scores) == gold);
    };
    return {
        {"metrics",
         {{"acc", right(plain)}, {"acc_norm", right(by_character)}, {"acc_bytes", right(by_byte)}}},
        {"prediction", largest(plain)},
        {"gold", gold},
        {"scores", plain}};
  }

 private:
  struct Config {
    std::string text;
    std::string choices;
    std::string answer;
    void fields(auto&& field) {
      field("text", text, "template of the question");
      field("choices", choices, "template whose value is the list of choices");
      field("answer", answer, "template of the right choice: its index or its text");
    }
  };
  Config config_;
  Template text_;
  Template choices_;
  Template answer_;
  std::string delimiter_;
};

const RegisterKind<MultipleChoice> registered(
    "multiple_choice", "each choice continues the same context; the likeliest is the answer");

}  // namespace
}  // namespace assay::tasks
