// Last word: the log-likelihood of one target after its context.
//   acc         every token of the target was the likeliest one
//   perplexity  exp(−mean log-likelihood of the targets)
// No delimiter is put before the target in the scored question.
#include "tasks/kind.h"

namespace assay::tasks {
namespace {

class LastWord final : public Kind {
 public:
  Fields fields() override { return fields_of(config_); }
  void complete(const ConfigNode& file, const TaskConfig& task) override {
    text_ = template_of(file, "text", config_.text);
    target_ = template_of(file, "target", config_.target);
    delimiter_ = task.target_delimiter;
  }
  std::vector<std::string> metrics() const override { return {"acc", "perplexity"}; }
  std::string example(const Json& document) const override {
    return text_.render(document) + delimiter_ + target_.render(document);
  }
  Asked ask(const Json& document, const std::string& before, Encoder&) const override {
    Asked asked;
    asked.continuations.push_back({before + text_.render(document), target_.render(document)});
    return asked;
  }
  Scores score(const Json& document, const Answer& answer) const override {
    const Likelihood& found = answer.likelihoods.front();
    return {{"metrics", {{"acc", double(found.greedy)}, {"perplexity", found.logprob}}},
            {"gold", target_.render(document)},
            {"scores", {found.logprob}}};
  }

 private:
  struct Config {
    std::string text;
    std::string target;
    void fields(auto&& field) {
      field("text", text, "template of the context");
      field("target", target, "template of what follows it, with the space before it");
    }
  };
  Config config_;
  Template text_;
  Template target_;
  std::string delimiter_;
};

const RegisterKind<LastWord> registered(
    "last_word", "the target's log-likelihood, and whether it is the greedy text");

}  // namespace
}  // namespace assay::tasks
