#pragma once
// A kind of task: what a model is asked about a document, and how its answers are scored. A file in
// kinds/ registers itself; task files name it.
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/registry.h"
#include "tasks/documents.h"
#include "tasks/encoder.h"
#include "tasks/template.h"

namespace assay::tasks {

// Fields of a task file that all kinds have. The fields of its kind are next to them.
struct TaskConfig {
  std::string kind;
  std::string documents;
  std::string few_shot_documents;
  std::string prepare;
  std::string description;
  std::string group;
  std::string few_shot_sampler = "random";
  int64_t few_shot = 0;
  int64_t few_shot_seed = 1234;
  std::string target_delimiter = " ";
  std::string few_shot_delimiter = "\n\n";
  std::vector<std::string> metrics;
  bool recall = false;
  std::string about;
  void fields(auto&& field) {
    field("kind", kind, "what is asked and how it is scored");
    field("documents", documents, "JSON Lines in the data folder, with or without .zst or .gz");
    field("few_shot_documents", few_shot_documents,
          "where examples are drawn from; empty: the scored documents");
    field("prepare", prepare, "a preparation of documents by name: hellaswag, race, wsc273");
    field("description", description, "template that begins every prompt");
    field("group", group, "field by whose value results are given, too, and examples are drawn");
    field("few_shot", few_shot, "examples before the question");
    field("few_shot_sampler", few_shot_sampler, "random (drawn for each document) or first");
    field("few_shot_seed", few_shot_seed, "of the random sampler");
    field("target_delimiter", target_delimiter, "between question and answer");
    field("few_shot_delimiter", few_shot_delimiter, "after an example");
    field("metrics", metrics, "of the kind's metrics, those that are reported; empty: all");
    field("recall", recall, "the answer is in the prompt; a study compares these tasks with Δ_end");
    field("about", about, "source of the definition");
  }
};

// Requests to a model about one document.
struct Asked {
  struct Continuation {
    // the log-likelihood of `text` after `context`
    std::string context;
    std::string text;
  };
  std::vector<Continuation> continuations;
  std::optional<std::string> rolling;  // the log-likelihood of all of it
  std::optional<std::string> prompt;   // a text is generated after it
};

struct Likelihood {
  double logprob = 0;  // nats, summed
  bool greedy = true;  // every token was the likeliest
};
struct Answer {
  std::vector<Likelihood> likelihoods;  // of the continuations, or one of the rolling text
  std::string generated;                // up to the first stop
};

// {"metrics": {name: number}, "prediction", "gold"}; a metric of a mean is a number of this
// document, see metrics.h.
using Scores = Json;

struct Generation {
  std::vector<std::string> until;
  int64_t max_tokens = 0;  // 0: nothing is generated
};

class Kind {
 public:
  virtual ~Kind() = default;
  virtual Fields fields() = 0;
  // After the fields were read: compiles templates. `where` gives the place of a field in
  // the task file.
  virtual void complete(const ConfigNode& file, const TaskConfig& config) = 0;
  virtual std::vector<std::string> metrics() const = 0;
  // Question and answer as an example, without what follows it.
  virtual std::string example(const Json& document) const = 0;
  // `before`: description and examples.
  virtual Asked ask(const Json& document, const std::string& before, Encoder& encoder) const = 0;
  virtual Scores score(const Json& document, const Answer& answer) const = 0;
  virtual Generation generation() const { return {}; }
  // Documents that the kind makes, in the place of those in a file. `source` is the file that the
  // task names as `documents`; empty for none.
  virtual bool makes_documents() const { return false; }
  virtual std::vector<Json> documents(const fs::path& /*source*/, Encoder& /*encoder*/) const {
    return {};
  }
  // The document is left out, as the original does.
  virtual bool skipped(const Json& /*document*/) const { return false; }
};

struct KindEntry {
  std::unique_ptr<Kind> (*make)();
  std::string about;
};
Registry<KindEntry>& kinds();

// const RegisterKind<LastWord> registered("last_word", "…");
template <class K>
struct RegisterKind {
  RegisterKind(const std::string& name, std::string about) {
    kinds().add(
        name, {[]() -> std::unique_ptr<Kind> { return std::make_unique<K>(); }, std::move(about)});
  }
};

// The template of a field. BadInput when a required field is empty.
Template template_of(const ConfigNode& file, const std::string& field, const std::string& source,
                     bool required = true);
// The index of the right choice: an integer, or a string that is one, or the text of a
// choice. BadInput otherwise.
int64_t index_of_answer(const Json& answer, const std::vector<std::string>& choices);
std::vector<std::string> strings_of(const Json& value,
                                    const std::string& field);  // BadInput when no list of strings
size_t largest(const std::vector<double>& values);              // the first among equals

}  // namespace assay::tasks
