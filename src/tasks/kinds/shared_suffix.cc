// Shared suffix: the choices are contexts, and the same text continues each of them (partial
// evaluation of WinoGrande and WSC [Trinh & Le 2018]).
//   acc   the right context gives the text the largest log-likelihood
#include "tasks/kind.h"

namespace assay::tasks {
namespace {

class SharedSuffix final : public Kind {
 public:
  Fields fields() override { return fields_of(config_); }
  void complete(const ConfigNode& file, const TaskConfig& task) override {
    contexts_ = template_of(file, "contexts", config_.contexts);
    suffix_ = template_of(file, "suffix", config_.suffix);
    answer_ = template_of(file, "answer", config_.answer);
    delimiter_ = task.target_delimiter;
  }
  std::vector<std::string> metrics() const override { return {"acc"}; }
  std::string example(const Json& document) const override {
    const auto contexts = strings_of(contexts_.value(document), "contexts");
    const auto gold = size_t(index_of_answer(answer_.value(document), contexts));
    return contexts[gold] + delimiter_ + suffix_.render(document);
  }
  Asked ask(const Json& document, const std::string& before, Encoder&) const override {
    const auto contexts = strings_of(contexts_.value(document), "contexts");
    index_of_answer(answer_.value(document), contexts);
    Asked asked;
    for (const std::string& context : contexts)
      asked.continuations.push_back({before + context, delimiter_ + suffix_.render(document)});
    return asked;
  }
  Scores score(const Json& document, const Answer& answer) const override {
    const auto contexts = strings_of(contexts_.value(document), "contexts");
    const auto gold = size_t(index_of_answer(answer_.value(document), contexts));
    std::vector<double> scores;
    for (const Likelihood& likelihood : answer.likelihoods) scores.push_back(likelihood.logprob);
    return {{"metrics", {{"acc", double(largest(scores) == gold)}}},
            {"prediction", largest(scores)},
            {"gold", gold},
            {"scores", scores}};
  }

 private:
  struct Config {
    std::string contexts;
    std::string suffix;
    std::string answer;
    void fields(auto&& field) {
      field("contexts", contexts, "template whose value is the list of contexts");
      field("suffix", suffix, "template of the text that follows each of them");
      field("answer", answer, "template of the right context: its index");
    }
  };
  Config config_;
  Template contexts_;
  Template suffix_;
  Template answer_;
  std::string delimiter_;
};

const RegisterKind<SharedSuffix> registered(
    "shared_suffix", "the choices are contexts of one text; the one that makes it likeliest");

}  // namespace
}  // namespace assay::tasks
