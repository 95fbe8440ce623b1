// Rolling perplexity: every token of a text is predicted once, in windows of the
// model's longest input.
//   word_perplexity  exp(−Σ log-likelihood / Σ words)      words and bytes are those of `counted`,
//   byte_perplexity  exp(−Σ log-likelihood / Σ bytes)      sums run over all documents
//   bits_per_byte    −Σ log-likelihood / Σ bytes / ln 2
#include "tasks/kind.h"
#include "tasks/text.h"

namespace assay::tasks {
namespace {

// Pieces between runs of white space, empty ones at both ends included.
int64_t count_words(const std::string& text) {
  int64_t words = 1;
  bool space = false;
  for (const char32_t c : code_points(text)) {
    if (is_space(c) && !space) ++words;
    space = is_space(c);
  }
  return words;
}

class Rolling final : public Kind {
 public:
  Fields fields() override { return fields_of(config_); }
  void complete(const ConfigNode& file, const TaskConfig& task) override {
    if (task.few_shot > 0)
      fail("{}: examples cannot precede a rolling text", file.where("few_shot"));
    text_ = template_of(file, "text", config_.text);
    counted_ =
        template_of(file, "counted", config_.counted.empty() ? config_.text : config_.counted);
  }
  std::vector<std::string> metrics() const override {
    return {"word_perplexity", "byte_perplexity", "bits_per_byte"};
  }
  std::string example(const Json& document) const override { return text_.render(document); }
  Asked ask(const Json& document, const std::string&, Encoder&) const override {
    Asked asked;
    asked.rolling = text_.render(document);
    return asked;
  }
  Scores score(const Json& document, const Answer& answer) const override {
    const std::string counted = counted_.render(document);
    const double logprob = answer.likelihoods.front().logprob;
    return {
        {"metrics",
         {{"word_perplexity", logprob}, {"byte_perplexity", logprob}, {"bits_per_byte", logprob}}},
        {"weights",
         {{"word_perplexity", count_words(counted)},
          {"byte_perplexity", counted.size()},
          {"bits_per_byte", counted.size()}}},
        {"scores", {logprob}}};
  }

 private:
  struct Config {
    std::string text;
    std::string counted;
    void fields(auto&& field) {
      field("text", text, "template of the text");
      field("counted", counted,
            "template of the text whose words and bytes count; empty: the text itself");
    }
  };
  Config config_;
  Template text_;
  Template counted_;
};

const RegisterKind<Rolling> registered("rolling", "perplexity of whole texts, by word and by byte");

}  // namespace
}  // namespace assay::tasks
