#pragma once
// A model and a task: asks, answers, scores, and stores each item.
#include <functional>
#include <string>

#include "nn/language_model.h"
#include "tasks/results.h"
#include "tasks/scorer.h"

namespace assay::tasks {

struct EvaluateOptions {
  fs::path data;
  int64_t limit = 0;    // documents, the first of the file; 0: all
  int64_t longest = 0;  // tokens read at most; 0: eval::longest_input() of the model
  bool bos = false;
  Encoder::Prefix prefix = Encoder::Prefix::bos;
  ScorerOptions scorer;
};

// The model as results name it.
struct Subject {
  nn::LanguageModel& model;
  const data::Tokenizer& tokenizer;
  // weights: sha256 of their file
  std::string name;
  std::string weights;
  std::string precision;
};

struct Ran {
  std::string key;  // of the results
  // answered now; the others were there
  int64_t items = 0;
  int64_t answered = 0;
  int64_t truncated = 0;  // items of which a row lost tokens
  int64_t tokens_read = 0;
  int64_t tokens_alone = 0;
  double seconds = 0;  // in the model
};

// Requirements of a task that hold for every model with this tokenizer.
struct Demand {
  int64_t items = 0;
  int64_t longest = 0;  // tokens that the model has to read to see all of the longest item
  int64_t least = 0;    // tokens that it has to read to answer every item
};
// Reads and encodes the documents, so that what is wrong with them is found without a model.
// BadInput names task and document.
Demand demand_of(const Task& task, const data::Tokenizer& tokenizer,
                 const EvaluateOptions& options);

// sha256 of all that decides the items of a task and how they are asked, without the model:
// definition, documents, their number, tokenizer, longest input, tokens before a text.
std::string question_key(const Task& task, const data::Tokenizer& tokenizer,
                         const EvaluateOptions& options);

// Answers what `results` does not hold yet. `progress` is called with answered and all
// items. BadInput names task and document. Throws Interrupted between batches; what was
// answered is stored.
Ran evaluate(const Task& task, const Subject& subject, const EvaluateOptions& options,
             Results& results,
             const std::function<void(int64_t answered, int64_t all)>& progress = {});

}  // namespace assay::tasks
