// Passkey retrieval as a task, S-NIAH of RULER (niah.h): one length per task. Its documents are
// made for the tokenizer; `documents` names the text of the haystack.
//   contains   the greedy text holds the value
#include "tasks/niah.h"

#include "base/random.h"
#include "tasks/kind.h"

namespace assay::tasks {
namespace {

class Niah final : public Kind {
 public:
  Fields fields() override { return fields_of(config_); }
  void complete(const ConfigNode& file, const TaskConfig& task) override {
    const auto need = [&](bool good, const char* field, const char* expected) {
      if (!good) fail("{}: '{}' must be {}. Nothing was run.", file.where(field), field, expected);
    };
    need(config_.variant >= 1 && config_.variant <= 3, "variant", "1, 2 or 3");
    need(config_.length > 0, "length", "the tokens of prompt and answer");
    need(config_.samples > 0, "samples", "positive");
    need(config_.max_tokens > 0, "max_tokens", "positive");
    need(config_.seed >= 0, "seed", "0 or more");
    need(config_.variant == 1 || !task.documents.empty(), "documents",
         "the text that hides the needle, for variants 2 and 3");
    need(config_.variant != 1 || task.documents.empty(), "documents", "absent for variant 1");
    need(task.few_shot == 0, "few_shot", "0");
  }
  bool makes_documents() const override { return true; }
  // In an order that does not depend on the depth, so that the first ones have every depth.
  std::vector<Json> documents(const fs::path& source, Encoder& encoder) const override {
    const NiahOptions options{.variant = int(config_.variant),
                              .length = config_.length,
                              .reserved = config_.max_tokens,
                              .samples = config_.samples,
                              .seed = uint64_t(config_.seed),
                              .haystack = source.empty() ? "" : read_haystack(source)};
    const std::vector<NeedleSample> samples = needle_samples(
        options, [&](const std::string& text) { return int64_t(encoder.encode(text).size()); });
    const Permutation order(samples.size(), options.seed, 0);
    std::vector<Json> out;
    for (size_t i = 0; i < samples.size(); ++i) {
      const NeedleSample& sample = samples[order(i)];
      out.push_back({{"prompt", sample.prompt},
                     {"answer", sample.answer},
                     {"depth", sample.depth},
                     {"units", sample.units}});
    }
    return out;
  }
  std::vector<std::string> metrics() const override { return {"contains"}; }
  Generation generation() const override { return {{}, config_.max_tokens}; }
  std::string example(const Json& document) const override {
    return document["prompt"].get<std::string>() + " " + document["answer"].get<std::string>();
  }
  Asked ask(const Json& document, const std::string& before, Encoder&) const override {
    Asked asked;
    asked.prompt = before + document["prompt"].get<std::string>();
    return asked;
  }
  Scores score(const Json& document, const Answer& answer) const override {
    return {{"metrics", {{"contains", needle_score(answer.generated, document["answer"])}}},
            {"prediction", answer.generated},
            {"gold", document["answer"]}};
  }

 private:
  struct Config {
    int64_t variant = 1;
    int64_t length = 1024;
    int64_t samples = 40;
    int64_t max_tokens = 128;
    int64_t seed = 42;
    void fields(auto&& field) {
      field("variant", variant, "1: numbers in repeated lines; 2: numbers and 3: UUIDs in a text");
      field("length", length, "tokens of prompt and answer together");
      field("samples", samples, "needles, spread evenly over the depths");
      field("max_tokens", max_tokens, "tokens of the answer; they are part of the length");
      field("seed", seed, "of keys and values");
    }
  };
  Config config_;
};

const RegisterKind<Niah> registered(
    "niah", "a number or UUID that is hidden in a long text (S-NIAH of RULER)");

}  // namespace
}  // namespace assay::tasks
