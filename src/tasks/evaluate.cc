#include "tasks/evaluate.h"

#include <chrono>

#include "eval/longest_input.h"
#include "tasks/matching.h"

namespace assay::tasks {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kQuestionsAtOnce = 4096;
constexpr size_t kStoredAtOnce = 256;

std::string data_hash(const Task& task, const fs::path& data) {
  std::string both;  // empty when the kind makes its documents from nothing
  if (!task.config.documents.empty())
    both = sha256_of_file(find_documents(data, task.config.documents));
  if (task.config.few_shot > 0 && !task.config.few_shot_documents.empty())
    both += sha256_of_file(find_documents(data, task.config.few_shot_documents));
  return both;
}

std::string settings_of(const EvaluateOptions& options, int64_t longest) {
  return fmt::format("longest {}, bos {}, prefix {}", longest, options.bos,
                     options.prefix == Encoder::Prefix::bos);
}

// An error about a document, with its place.
template <class Action>
auto about(const Task& task, const Question& question, Action&& action) {
  try {
    return action();
  } catch (const BadInput& error) {
    fail("{}: document {} of {}: {}", task.name, question.index + 1, task.config.documents,
         error.what());
  }
}

class Evaluator {
 public:
  Evaluator(const Task& task, const Subject& subject, const EvaluateOptions& options,
            Results& results)
      : task_(task),
        subject_(subject),
        options_(options),
        results_(results),
        encoder_(subject.tokenizer, options.bos, options.prefix),
        scorer_(subject.model, options.scorer),
        longest_(options.longest > 0 ? options.longest : eval::longest_input(subject.model)) {
    if (subject.tokenizer.vocab_size() > subject.model.spec.config.vocab_size)
      fail("{}: its tokenizer has {} tokens, and the model knows {}", subject.name,
           subject.tokenizer.vocab_size(), subject.model.spec.config.vocab_size);
    if (longest_ > subject.model.max_time())
      fail("{}: {} tokens do not fit the {} positions of the model", subject.name, longest_,
           subject.model.max_time());
  }

  Ran run(const std::function<void(int64_t, int64_t)>& progress) {
    const std::vector<Question> all = questions(task_, options_.data, options_.limit, encoder_);
    const Evaluation evaluation = describe();
    ran_.key = evaluation.key();
    ran_.items = int64_t(all.size());
    results_.begin(evaluation);
    const std::set<size_t> finished = results_.finished(ran_.key);
    std::vector<const Question*> open;
    for (const Question& question : all)
      if (!finished.contains(question.index)) open.push_back(&question);
    total_ = int64_t(open.size());
    progress_ = progress;
    for (size_t begin = 0; begin < open.size(); begin += kQuestionsAtOnce) {
      const size_t end = std::min(open.size(), begin + kQuestionsAtOnce);
      try {
        answer({open.begin() + std::ptrdiff_t(begin), open.begin() + std::ptrdiff_t(end)});
      } catch (...) {
        store();
        throw;
      }
      store();
    }
    std::set<size_t> asked;  // the results may hold items past the limit
    for (const Question& question : all) asked.insert(question.index);
    for (const Item& item : results_.items(ran_.key))
      ran_.truncated += item.dropped > 0 && asked.contains(item.index);
    ran_.tokens_read = scorer_.tokens_read();
    ran_.tokens_alone = scorer_.tokens_alone();
    return ran_;
  }

 private:
  Evaluation describe() const {
    const std::string settings =
        fmt::format("precision {}, {}", subject_.precision, settings_of(options_, longest_));
    return {subject_.name,
            sha256(subject_.model.spec.toml() + subject_.weights),
            subject_.tokenizer.sha256(),
            data_hash(task_, options_.data),
            settings,
            task_.name,
            task_.definition};
  }

  void answer(const std::vector<const Question*>& open) {
    std::vector<std::vector<Row>> items;
    std::vector<std::vector<int64_t>> prompts;
    std::vector<int64_t> dropped;
    bool rolling = false;  // the same for all questions of a task
    for (const Question* question : open) {
      const Asked asked = about(task_, *question, [&] {
        return task_.kind->ask(question->document, question->before, encoder_);
      });
      rolling = asked.rolling.has_value();
      int64_t& lost = dropped.emplace_back(0);
      if (asked.prompt)
        prompts.push_back(about(task_, *question, [&] { return prompt_of(*asked.prompt, lost); }));
      else items.push_back(about(task_, *question, [&] { return rows_of(asked, lost); }));
    }
    const auto start = Clock::now();
    const auto finish = [&](size_t i, const Answer& found) {
      waiting_.push_back({open[i]->index, open[i]->group,
                          task_.kind->score(open[i]->document, found), dropped[i]});
      ++ran_.answered;
      if (waiting_.size() >= kStoredAtOnce) store();
      if (progress_) progress_(ran_.answered, total_);
    };
    if (!prompts.empty()) generate(prompts, finish);
    if (!items.empty())
      scorer_.score(items, [&](size_t i, std::vector<Likelihood> found) {
        finish(i, {rolling ? std::vector{sum(found)} : std::move(found), ""});
      });
    ran_.seconds += std::chrono::duration<double>(Clock::now() - start).count();
  }

  static Likelihood sum(const std::vector<Likelihood>& parts) {
    Likelihood total;
    for (const Likelihood& part : parts) {
      total.logprob += part.logprob;
      total.greedy = total.greedy && part.greedy;
    }
    return total;
  }

  std::vector<Row> rows_of(const Asked& asked, int64_t& dropped) {
    std::vector<Row> rows;
    if (asked.rolling) rows = encoder_.windows(*asked.rolling, longest_);
    for (const Asked::Continuation& continuation : asked.continuations)
      rows.push_back(encoder_.pair(continuation.context, continuation.text));
    if (rows.empty()) fail("the text is empty");
    for (Row& row : rows) dropped = std::max(dropped, truncate(row, longest_));
    return rows;
  }

  std::vector<int64_t> prompt_of(const std::string& text, int64_t& dropped) {
    const int64_t room = longest_ - task_.kind->generation().max_tokens;
    if (room < 1)
      fail("max_tokens = {} leaves no room for a prompt: the model reads {} tokens at most",
           task_.kind->generation().max_tokens, longest_);
    std::vector<int64_t> tokens = encoder_.encode(text);
    if (tokens.empty()) fail("the prompt is empty");
    dropped = std::max<int64_t>(0, int64_t(tokens.size()) - room);
    tokens.erase(tokens.begin(), tokens.begin() + dropped);
    return tokens;
  }

  template <class Finish>
  void generate(const std::vector<std::vector<int64_t>>& prompts, Finish&& finish) {
    const Generation rule = task_.kind->generation();
    const auto ended = [&](size_t, const std::vector<int64_t>& tokens) {
      if (tokens.back() == encoder_.separator()) return true;
      const std::string text = encoder_.decode(tokens);
      return cut_at(text, rule.until) != text;
    };
    scorer_.generate(prompts, rule.max_tokens, ended,
                     [&](size_t i, const std::vector<int64_t>& tokens) {
                       finish(i, Answer{{}, cut_at(encoder_.decode(tokens), rule.until)});
                     });
  }

  void store() {
    if (!waiting_.empty()) results_.add(ran_.key, waiting_);
    waiting_.clear();
  }

  const Task& task_;
  const Subject& subject_;
  const EvaluateOptions& options_;
  Results& results_;
  Encoder encoder_;
  Scorer scorer_;
  int64_t longest_;
  int64_t total_ = 0;
  Ran ran_;
  std::vector<Item> waiting_;
  std::function<void(int64_t, int64_t)> progress_;
};

}  // namespace

Demand demand_of(const Task& task, const data::Tokenizer& tokenizer,
                 const EvaluateOptions& options) {
  Encoder encoder(tokenizer, options.bos, options.prefix);
  Demand demand;
  const auto add = [&](int64_t longest, int64_t least) {
    demand.longest = std::max(demand.longest, longest);
    demand.least = std::max(demand.least, least);
  };
  for (const Question& question : questions(task, options.data, options.limit, encoder))
    about(task, question, [&] {
      const Asked asked = task.kind->ask(question.document, question.before, encoder);
      const int64_t room = task.kind->generation().max_tokens;
      if (asked.rolling) {
        const int64_t length = std::ssize(encoder.encode(*asked.rolling));
        if (length == 0) fail("the text is empty");
        add(length, 1);
      }
      if (asked.prompt) add(std::ssize(encoder.encode(*asked.prompt)) + room, room + 1);
      for (const Asked::Continuation& continuation : asked.continuations) {
        const Row row = encoder.pair(continuation.context, continuation.text);
        add(std::ssize(row.tokens) - 1, row.scored);
      }
      ++demand.items;
    });
  return demand;
}

std::string question_key(const Task& task, const data::Tokenizer& tokenizer,
                         const EvaluateOptions& options) {
  return sha256(Json{task.definition, data_hash(task, options.data), options.limit,
                     tokenizer.sha256(), settings_of(options, options.longest)}
                    .dump());
}

Ran evaluate(const Task& task, const Subject& subject, const EvaluateOptions& options,
             Results& results, const std::function<void(int64_t, int64_t)>& progress) {
  return Evaluator(task, subject, options, results).run(progress);
}

}  // namespace assay::tasks
