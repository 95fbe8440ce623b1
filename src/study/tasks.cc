#include "study/tasks.h"

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <set>
#include <thread>

#include "base/interrupt.h"
#include "base/progress.h"
#include "data/token_store.h"
#include "study/process.h"
#include "study/run_folder.h"

namespace assay::study {
namespace {

using Questions = std::vector<run::TaskQuestion>;

// Models trained by Assay know the separator of documents, and no bos.
std::vector<std::string> task_arguments(const TaskPlan& tasks) {
  std::vector<std::string> out = {"--data", tasks.data, "--prefix", "separator"};
  if (tasks.limit > 0) out.insert(out.end(), {"--limit", std::to_string(tasks.limit)});
  if (tasks.max_length > 0)
    out.insert(out.end(), {"--max-length", std::to_string(tasks.max_length)});
  return out;
}

// Waits for a child; ends it when this process is interrupted.
Ending wait_for(pid_t child) {
  Ending ending;
  while (!ended(child, ending)) {
    if (interrupted()) {
      ::kill(child, SIGTERM);
      wait(child);
      check_interrupt();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return ending;
}

// Removes its file at the end of a scope.
struct TemporaryOutput {
  fs::path path;
  ~TemporaryOutput() {
    std::error_code none;
    fs::remove(path, none);
  }
};

// Output of `assay eval tasks --dry-run` for the plan's tasks with a tokenizer.
Questions questions_of(const Plan& plan, const fs::path& tokenizer, const StudyOptions& options) {
  const TemporaryOutput output{options.study / "configs" / "tasks.question.out"};
  const TemporaryOutput errors{options.study / "configs" / "tasks.question.err"};
  for (const fs::path& file : {output.path, errors.path}) fs::remove(file);
  std::vector<std::string> arguments = {trainer(options), "eval",        "tasks",  "--dry-run",
                                        "--json",         "--tokenizer", tokenizer};
  for (const std::string& task : plan.tasks->list)
    arguments.insert(arguments.end(), {"--tasks", task});
  std::ranges::copy(task_arguments(*plan.tasks), std::back_inserter(arguments));
  const Ending ending = wait_for(start({arguments, output.path, errors.path}));
  const std::string text = read_file(output.path);
  const std::string problem = read_file(errors.path);
  if (ending.code == kBadInput) {
    std::string error = parse_record<TrainerError>(text, "the answer about the tasks").error;
    const std::string ending = " Nothing was run.";
    if (error.ends_with(ending)) error.resize(error.size() - ending.size());
    const bool whole = !error.empty() && std::string_view(".?!").find(error.back()) < 3;
    fail("{}: {}{}{}", plan.tasks->place, error, whole ? "" : ".", ending);
  }
  if (ending.code != 0)
    fail<Error>("The tasks of the plan cannot be read ({}): {}", ending.text(), problem);
  return parse_record<run::TaskQuestions>(text, "the answer about the tasks").tasks;
}

// The length of the model and that of the tasks.
void check_lengths(const Plan& plan, const Candidate& c, Progress& progress) {
  if (!c.answer.longest_input) return;
  const int64_t most = *c.answer.longest_input;
  const std::string& model = c.model->name;
  if (plan.tasks->max_length > most)
    fail(
        "{}: max_length = {}, but {} reads {} tokens at most: "
        "its learned positions, or model.max_positions, or 2,048. Nothing was run.",
        plan.tasks->place, plan.tasks->max_length, model, most);
  const int64_t read = plan.tasks->max_length > 0 ? plan.tasks->max_length : most;
  for (const run::TaskQuestion& task : c.setting->tasks) {
    if (task.items == 0)
      fail("{}: task {} has no items. Nothing was run.", plan.tasks->place, task.name);
    if (task.least > read)
      fail(
          "{}: {} reads {} tokens at most, and task {} needs {} to answer every item. "
          "Give the model more positions (model.max_positions), or remove the task. "
          "Nothing was run.",
          plan.tasks->place, model, read, task.name, task.least);
    if (task.longest > read)
      progress.log(
          fmt::format("{} reads {} tokens at most, and the longest item of task {} has {}: "
                      "first tokens of long items are left out, and long texts are read in windows",
                      model, read, task.name, task.longest));
  }
}

bool is_answered(const std::vector<run::TaskResult>& results, const run::TaskQuestion& question) {
  return std::ranges::any_of(results, [&](const run::TaskResult& result) {
    return result.name == question.name && result.key == question.key && result.problem.empty();
  });
}

// Places in the plan's list of tasks, and in the questions of a setting, which have one order.
using Places = std::vector<size_t>;

// A run, and its tasks without an answer.
struct Work {
  PlannedRun run;
  run::Folder folder;
  Places open;
  int restarts = 0;
};

class Evaluations {
 public:
  Evaluations(const Plan& plan, const std::vector<PlannedRun>& runs, const StudyOptions& options,
              Store& store)
      : plan_(plan), options_(options), store_(store) {
    for (size_t slot = 0; slot < size_t(std::max<int64_t>(1, options.jobs)); ++slot)
      free_slots_.push_back(slot);
    std::set<std::string> seen;
    for (const PlannedRun& run : runs)
      if (run.purpose == purpose::kStudy && seen.insert(run.key).second) consider(run);
    planned_ = queue_.size();
  }

  std::vector<Failure> run() {
    while (!running_.empty() || (!queue_.empty() && !stopping_)) {
      if (interrupted() && !stopping_) stop();
      while (!stopping_ && !queue_.empty() && !free_slots_.empty()) launch();
      reap();
      show();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    if (stopping_)
      fail<Interrupted>(
          "interrupted: the tasks of {} of {} runs are evaluated. "
          "The answers of the others are stored, and the same command continues them.",
          evaluated_, planned_);
    return failures_;
  }

 private:
  struct Running {
    Work work;
    pid_t child;
    size_t slot;
  };

  const Questions& questions(const PlannedRun& run) const {
    return std::ranges::find(plan_.settings, run.setting, &Setting::name)->tasks;
  }
  Places unanswered(const PlannedRun& run) {
    const std::vector<run::TaskResult> results = store_.tasks(run.key);
    Places out;
    for (size_t i = 0; i < questions(run).size(); ++i)
      if (!is_answered(results, questions(run)[i])) out.push_back(i);
    return out;
  }

  void consider(const PlannedRun& run) {
    if (store_.status(run.key) != status::kDone) return;  // its training failed
    const run::Folder folder{options_.study / store_.folder(run.key)};
    Places open = unanswered(run);
    if (open.empty()) return;
    if (folder.tasks().exists()) {  // evaluated while no runner watched
      store_.set_tasks(run.key, folder.tasks().read().results);
      open = unanswered(run);
    }
    if (open.empty()) return;
    if (folder.outcome().exists() &&
        fs::exists(folder.checkpoint(folder.outcome().read().steps).weights()))
      queue_.push_back({run, folder, std::move(open)});
    else set_problem(run, open, "the final weights of the run are not in this study");
  }

  // Stores why tasks have no metrics.
  void set_problem(const PlannedRun& run, const Places& open, const std::string& problem) {
    std::vector<run::TaskResult> results = store_.tasks(run.key);
    for (const size_t place : open) {
      const run::TaskQuestion& question = questions(run)[place];
      std::erase_if(results, [&](const auto& result) { return result.name == question.name; });
      results.push_back({.name = question.name, .key = question.key, .problem = problem});
    }
    store_.set_tasks(run.key, results);
    progress_.log(fmt::format("{}: its tasks are not evaluated: {}", run.name, problem));
  }

  void launch() {
    Work work = std::move(queue_.front());
    queue_.pop_front();
    lock_when_free(work.folder.path);
    const size_t slot = free_slots_.front();
    free_slots_.pop_front();
    Command command{
        {trainer(options_), "eval", "tasks", work.folder.path, "--keep"}, work.folder.log(), {}};
    const auto add = [&](const std::vector<std::string>& more) {
      command.arguments.insert(command.arguments.end(), more.begin(), more.end());
    };
    for (const size_t place : work.open) add({"--tasks", plan_.tasks->list[place]});
    add(task_arguments(*plan_.tasks));
    add(placement(options_, slot));
    running_.push_back({std::move(work), start(command), slot});
  }

  void reap() {
    for (size_t i = 0; i < running_.size();) {
      Ending ending;
      if (!ended(running_[i].child, ending)) {
        ++i;
        continue;
      }
      Running over = std::move(running_[i]);
      running_.erase(running_.begin() + int64_t(i));
      free_slots_.push_front(over.slot);
      conclude(std::move(over.work), ending);
    }
  }

  void conclude(Work work, const Ending& ending) {
    if (work.folder.tasks().exists())
      store_.set_tasks(work.run.key, work.folder.tasks().read().results);
    if (stopping_ && ending.stopped_from_outside()) return;
    if (ending.stopped_from_outside() && work.restarts < kRestarts) {
      progress_.log(fmt::format("{}: {}; continuing its tasks", work.run.name, ending.text()));
      ++work.restarts;
      return queue_.push_front(std::move(work));
    }
    const Places open = unanswered(work.run);
    ++ended_;
    if (open.empty()) {
      ++evaluated_;
      progress_.log(fmt::format("tasks: {}/{} runs done: {}", ended_, planned_, work.run.name));
    }
    for (const size_t place : open) fail_task(work, questions(work.run)[place], ending);
  }

  void fail_task(const Work& work, const run::TaskQuestion& question, const Ending& ending) {
    std::string reason = fmt::format("{}: {}", ending.text(), last_line(work.folder.log()));
    for (const run::TaskResult& result : store_.tasks(work.run.key)) {
      if (result.name != question.name) continue;
      if (!result.problem.empty()) reason = result.problem;
      else if (result.key != question.key) reason = "its documents were changed while it was run";
    }
    const std::string name = fmt::format("{}, task {}", work.run.name, question.name);
    progress_.log(fmt::format("failed: {}: {}", name, reason));
    failures_.push_back({name, reason, work.folder.log()});
  }

  void stop() {
    stopping_ = true;
    progress_.log(fmt::format("interrupted; {} evaluations are storing", running_.size()));
    for (const Running& running : running_) ::kill(running.child, SIGINT);
  }

  void show() {
    const auto now = std::chrono::steady_clock::now();
    if (running_.empty() || now < next_status_) return;
    next_status_ = now + std::chrono::seconds(1);
    progress_.show(fmt::format("tasks: {}/{} runs  {}", ended_, planned_,
                               last_line(running_.front().work.folder.log())));
  }

  const Plan& plan_;
  const StudyOptions& options_;
  Store& store_;
  std::deque<Work> queue_;
  std::deque<size_t> free_slots_;
  std::vector<Running> running_;
  std::vector<Failure> failures_;
  Progress progress_;
  std::chrono::steady_clock::time_point next_status_{};
  // runs
  size_t planned_ = 0;
  size_t ended_ = 0;
  size_t evaluated_ = 0;
  bool stopping_ = false;
};

}  // namespace

void ask_tasks(Plan& plan, const std::vector<Candidate>& candidates, const StudyOptions& options) {
  if (!plan.tasks) return;
  Progress progress;
  std::map<fs::path, Questions> known;  // by token store
  for (Setting& setting : plan.settings)
    for (const Candidate& c : candidates) {
      if (c.setting != &setting) continue;
      const fs::path tokenizer = data::TokenStore(c.data).tokenizer_file();
      if (!fs::exists(tokenizer))
        fail(
            "{}: tasks need a tokenizer, and the token store {} has none. "
            "`assay data prepare --tokenizer` makes one of text. Nothing was run.",
            plan.tasks->place, c.data.string());
      progress.show("checking the tasks");
      if (!known.contains(c.data)) known[c.data] = questions_of(plan, tokenizer, options);
      setting.tasks = known[c.data];
      check_lengths(plan, c, progress);
    }
}

std::vector<Failure> evaluate_tasks(const Plan& plan, const std::vector<PlannedRun>& runs,
                                    const StudyOptions& options, Store& store) {
  if (!plan.tasks) return {};
  return Evaluations(plan, runs, options, store).run();
}

}  // namespace assay::study
