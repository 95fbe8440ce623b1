#include "study/runner.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <thread>

#include "base/interrupt.h"
#include "base/progress.h"
#include "data/overlap.h"
#include "study/launcher.h"
#include "study/reuse.h"
#include "study/run_folder.h"
#include "study/slurm.h"
#include "study/tasks.h"

namespace assay::study {
namespace {

using Clock = std::chrono::steady_clock;

struct Running {
  PlannedRun run;
  run::Folder folder;
  int restarts;
  double tokens_before;  // seen when it was started or resumed
};

class Runner {
 public:
  Runner(const StudyOptions& options, std::vector<PlannedRun> runs, Store& store,
         const Reusable& reusable, Launcher& launcher)
      : options_(options),
        store_(store),
        reusable_(reusable),
        launcher_(launcher),
        begun_(Clock::now()) {
    outcome_.planned = int64_t(runs.size());
    for (PlannedRun& run : runs)
      if (!ended_before(run)) queue_.push_back({std::move(run), 0});
    for (const auto& [run, restarts] : queue_) work_left_ += work(run, double(run.estimate.tokens));
  }

  Outcome run() {
    launcher_.look_around();
    while (!running_.empty() || (!queue_.empty() && !stopping_)) {
      try {
        if (interrupted() && !stopping_) stop("interrupted");
        if (!stopping_) fill();
        reap();
      } catch (const DiskFull& error) {  // every other run would fail, too
        disk_full_ = error.what();
        if (!stopping_) stop(disk_full_);
      }
      if (launcher_.is_detached() && (stopping_ || queue_.empty())) break;
      if (Clock::now() >= next_status_) show_status();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    if (!disk_full_.empty())
      fail<DiskFull>(
          "{}; the study was stopped after {} of {} runs.\n "
          " Free space and give the same command again: "
          "it continues, and finished runs are kept.",
          disk_full_, outcome_.done, outcome_.planned);
    if (stopping_ && launcher_.is_detached())
      fail<Interrupted>(
          "interrupted: {} of {} runs done, and nothing was submitted. "
          "The same command continues.",
          outcome_.done, outcome_.planned);
    if (stopping_)
      fail<Interrupted>(
          "interrupted: {} of {} runs done, the others saved. The same command continues them.",
          outcome_.done, outcome_.planned);
    launcher_.leave();
    outcome_.in_queue = int64_t(running_.size());
    return outcome_;
  }

 private:
  // True for a run that has ended: its results are there, or can be reused, or it failed.
  bool ended_before(const PlannedRun& run) {
    const run::Folder folder = run.folder(options_.study);
    if (store_.status(run.key) == status::kDone) {
      // Its results are stored
    } else if (folder.outcome().exists()) {
      if (!takes(run, folder)) return true;  // it ended while no runner watched
    } else if (const Reusable::Found* found = reusable_.find(run.key)) {
      store_.take_record(run.key, found->record, found->folder);
      ++outcome_.reused;
    } else if (launcher_.keeps_failures() && store_.status(run.key) == status::kFailed) {
      outcome_.failures.push_back({run.name, store_.reason(run.key), folder.log()});
      return true;
    } else {
      return false;
    }
    ++outcome_.done;
    ++outcome_.done_before;
    return true;
  }

  void fill() {
    while (!queue_.empty() && !launcher_.is_full()) {
      auto [run, restarts] = std::move(queue_.front());
      queue_.pop_front();
      launch(std::move(run), restarts);
    }
  }

  void launch(PlannedRun run, int restarts) {
    const run::Folder folder = run.folder(options_.study);
    make_folder(folder.path);
    const auto restarts_earlier = launcher_.started_earlier(run);
    if (!restarts_earlier) launcher_.start(run, restarts);
    store_.set_folder(run);
    store_.set_status(run.key, status::kRunning);
    const double before = tokens_of(run::newest_metrics(folder));
    running_.push_back({std::move(run), folder, restarts_earlier.value_or(restarts), before});
  }

  void reap() {
    for (size_t i = 0; i < running_.size();) {
      const std::optional<Ending> ending = launcher_.ended(running_[i].run);
      if (!ending) {
        ++i;
        continue;
      }
      const Running over = std::move(running_[i]);
      running_.erase(running_.begin() + int64_t(i));
      conclude(over, *ending);
    }
  }

  void conclude(const Running& over, const Ending& ending) {
    // A process that is killed at its exit has written all results before
    if (ending.code == 0 || over.folder.outcome().exists()) return finish(over);
    if (stopping_ && ending.stopped_from_outside())
      return store_.set_status(over.run.key, status::kInterrupted);
    if (ending.stopped_from_outside() && over.restarts < kRestarts) {
      progress_.log(fmt::format("{}: {}; resuming it", over.run.name, ending.text()));
      return queue_.push_front({over.run, over.restarts + 1});
    }
    const std::string last = last_line(over.folder.log());
    if (last.find(std::strerror(ENOSPC)) != std::string::npos)
      fail<DiskFull>("{}: the disk is full", over.folder.path.string());
    add_failure(over.run, over.folder, fmt::format("{}: {}", ending.text(), last));
    drop_work(over);
  }

  // False for results that cannot be taken: the run has failed, and the others go on.
  bool takes(const PlannedRun& run, const run::Folder& folder) {
    try {
      store_.take(run, folder);
      return true;
    } catch (const DiskFull&) {
      throw;
    } catch (const Error& error) {
      add_failure(run, folder, fmt::format("its results cannot be taken: {}", error.what()));
      return false;
    }
  }

  void finish(const Running& over) {
    if (!takes(over.run, over.folder)) return drop_work(over);
    ++outcome_.done;
    work_done_ += work(over.run, double(over.run.estimate.tokens) - over.tokens_before);
    progress_.log(fmt::format("{}/{} done: {}, {}", outcome_.done, outcome_.planned, over.run.name,
                              summary(over.folder)));
  }

  void add_failure(const PlannedRun& run, const run::Folder& folder, const std::string& reason) {
    store_.set_status(run.key, status::kFailed, reason);
    outcome_.failures.push_back({run.name, reason, folder.log()});
    progress_.log(fmt::format("failed: {}: {}", run.name, reason));
  }

  void drop_work(const Running& of) {
    work_left_ -= work(of.run, double(of.run.estimate.tokens) - of.tokens_before);
  }

  void stop(const std::string& why) {
    stopping_ = true;
    if (!launcher_.is_detached())
      progress_.log(fmt::format("{}; saving {}", why, counted(int64_t(running_.size()), "run")));
    launcher_.stop();
  }

  void show_status() {
    progress_.show(status());
    next_status_ = Clock::now() + std::chrono::seconds(1);
  }

  std::string status() const {
    std::vector<std::string> parts;
    double work_now = work_done_;
    for (const Running& running : running_) {
      const run::Newest newest = run::newest_metrics(running.folder);
      work_now += work(running.run, std::max(0.0, tokens_of(newest) - running.tokens_before));
      if (parts.size() < 3)
        parts.push_back(progress_text(running.run.name, newest, running.run.estimate.steps));
    }
    if (running_.size() > 3) parts.push_back(fmt::format("{} more", running_.size() - 3));
    const double seconds = std::chrono::duration<double>(Clock::now() - begun_).count();
    const std::string left =
        work_now > 0 && !stopping_
            ? Progress::duration(seconds * std::max(0.0, work_left_ - work_now) / work_now) +
                  " left"
            : "";
    return fmt::format("{}/{} done  {}  {}", outcome_.done, outcome_.planned, join(parts, "  "),
                       left);
  }

  static double tokens_of(const run::Newest& newest) {
    return newest.training ? double(newest.training->tokens.value_or(0)) : 0;
  }
  static double work(const PlannedRun& run, double tokens) {
    return tokens * run.estimate.flops_per_token;
  }

  const StudyOptions& options_;
  Store& store_;
  const Reusable& reusable_;
  Launcher& launcher_;
  Clock::time_point begun_;
  Clock::time_point next_status_{};
  std::deque<std::pair<PlannedRun, int>> queue_;  // with the number of restarts so far
  std::vector<Running> running_;
  Outcome outcome_;
  Progress progress_;
  // FLOPs: all that this call has to do; of runs that ended
  double work_left_ = 0;
  double work_done_ = 0;
  bool stopping_ = false;
  std::string disk_full_;  // the message; "" while there is space
};

void add(Outcome& total, const Outcome& part) {
  total.planned += part.planned;
  total.done += part.done;
  total.done_before += part.done_before;
  total.reused += part.reused;
  total.in_queue += part.in_queue;
  total.failures.insert(total.failures.end(), part.failures.begin(), part.failures.end());
}

// Mean over the training domains of the loss at the end of a run.
double held_out_loss(const run::End& end, const Setting& setting) {
  double sum = 0;
  for (const std::string& domain : setting.data.train)
    sum += end.sets.at(domain + "." + setting.data.held_out).loss;
  return sum / double(setting.data.train.size());
}

// Measures for each setting, once per data, how much of the held-out text and of the test text
// occurs in the training text.
void measure_overlap(const std::vector<Candidate>& candidates, Store& store) {
  Progress progress;
  for (const Candidate& c : candidates) {
    if (store.overlap(c.answer.data)) continue;
    progress.show("comparing the test text with the training text");
    const DataSetting& setting = c.setting->data;
    Overlap all;
    const auto add = [&](const std::string& split, const std::vector<std::string>& domains) {
      if (domains.empty()) return;
      const data::OverlapOptions options{
          .test_split = split, .train_domains = setting.train, .show_progress = false};
      for (const auto& row : data::overlap(data::TokenStore(c.data), options))
        if (std::ranges::count(domains, row.domain)) all.push_back(row);
    };
    std::vector<std::string> unseen = setting.out_of_domain;
    unseen.insert(unseen.end(), setting.further.begin(), setting.further.end());
    add(setting.test, unseen);
    add(setting.held_out, setting.train);
    store.set_overlap(c.answer.data, all);
  }
}

// Each run once: a model and its twin are tuned by the same runs, and a rung may be a tuning run.
std::vector<PlannedRun> distinct(const std::vector<PlannedRun>& runs) {
  std::vector<PlannedRun> out;
  std::set<std::string> keys;
  for (const PlannedRun& run : runs)
    if (keys.insert(run.key).second) out.push_back(run);
  return out;
}

// The rate with the lowest mean held-out loss, for each model. A rate counts only when all of its
// runs have ended; end_of(run) is absent for a run that has not.
Rates best_rates(const Plan& plan, const std::vector<PlannedRun>& runs, auto&& end_of) {
  std::map<std::pair<std::string, std::string>, std::map<double, std::vector<double>>> losses;
  for (const PlannedRun& run : runs) {
    const auto setting = std::ranges::find(plan.settings, run.setting, &Setting::name);
    if (const std::optional<run::End> end = end_of(run))
      losses[{run.setting, run.model}][run.learning_rate].push_back(held_out_loss(*end, *setting));
  }
  Rates best;
  for (const auto& [model, grid] : losses) {
    double lowest = std::numeric_limits<double>::infinity();
    for (const auto& [rate, found] : grid) {
      if (found.size() < plan.tuning->seeds.size()) continue;
      const double mean = std::accumulate(found.begin(), found.end(), 0.0) / double(found.size());
      if (mean < lowest) {
        lowest = mean;
        best[model] = rate;
      }
    }
  }
  return best;
}

// Failed runs of a grid are no failure of the study while the model has a rate: a rate that
// diverges is an answer.
void drop_tuning_failures(Outcome& outcome, const std::vector<PlannedRun>& runs,
                          const Rates& rates) {
  std::erase_if(outcome.failures, [&](const Failure& failure) {
    const auto run = std::ranges::find(runs, failure.name, &PlannedRun::name);
    return run != runs.end() && rates.contains({run->setting, run->model});
  });
}

// Tells why runs that are to be trained are not those of records that have their names.
void explain(const Reusable& reusable, std::vector<PlannedRun> runs, auto&& is_done) {
  std::erase_if(runs, is_done);
  const std::string text = reusable.explain_missing(runs);
  if (!text.empty()) Progress().log("--reuse: " + text);
}

// Results that exist before anything is trained, of this study and of the folders to reuse.
class Results {
 public:
  explicit Results(const StudyOptions& options) : study_(options.study), reusable_(options.reuse) {
    if (fs::exists(study_ / "study.sqlite")) store_.emplace(study_, Database::Mode::read);
  }
  // Where a run's results are; "" for a run that has none.
  std::string folder(const PlannedRun& run) const {
    const run::Folder own = run.folder(study_);
    if (is_stored(run) || own.outcome().exists()) return own.path;
    const Reusable::Found* found = reusable_.find(run.key);
    return found ? found->folder : "";
  }
  std::optional<run::End> end(const PlannedRun& run) const {
    if (is_stored(run)) return store_->finished(run.key).end;
    const run::Folder own = run.folder(study_);
    if (own.outcome().exists()) return run::read_finished(own).end;
    const Reusable::Found* found = reusable_.find(run.key);
    if (!found) return {};
    return found->record.end;
  }
  const Reusable& reusable() const { return reusable_; }

 private:
  bool is_stored(const PlannedRun& run) const {
    return store_ && store_->status(run.key) == status::kDone;
  }
  fs::path study_;
  Reusable reusable_;
  mutable std::optional<Store> store_;  // none before the first run; its queries are not const
};

// A study's folder, locked. Without keep(), what this process made in it is removed, and nothing
// that others wrote there.
class StudyFolder {
 public:
  // `waits`: for a process that holds the folder, a minute at most.
  StudyFolder(const Plan& plan, const fs::path& study, bool waits = false)
      : data_(synthetic_stores(plan, study)) {
    run::check_output_folder(study, study / "study.sqlite");
    for (fs::path folder = study; !folder.empty() && !fs::exists(folder);
         folder = folder.parent_path())
      folders_.push_back(folder);
    const fs::path lock = run::Folder{study}.lock();
    const bool is_first = !waits && !fs::exists(lock);
    make_folder(study);
    lock_ = waits ? lock_when_free(study) : std::make_unique<FolderLock>(study);
    // The process that held the folder may have made them
    std::erase_if(data_, [](const fs::path& path) { return fs::exists(path); });
    if (is_first) data_.push_back(lock);
    for (const fs::path& folder : {study / "configs", study / "data"})
      if (!fs::exists(folder)) folders_.insert(folders_.begin(), folder);
  }
  StudyFolder(const StudyFolder&) = delete;
  ~StudyFolder() {
    if (is_kept_) return;
    std::error_code none;
    for (const fs::path& path : data_) fs::remove_all(path, none);
    // Unless something else is there by now
    for (const fs::path& folder : folders_) fs::remove(folder, none);
  }
  void keep() { is_kept_ = true; }

 private:
  // made by this process; the innermost folders first
  std::vector<fs::path> data_;
  std::vector<fs::path> folders_;
  std::unique_ptr<FolderLock> lock_;
  bool is_kept_ = false;
};

// Until the runs are over, or go on without this process.
Outcome run_plan_with(Launcher& launcher, const StudyOptions& options) {
  Plan plan = read_plan(options.plan, options.set);
  const Reusable reusable(options.reuse);
  StudyFolder folder(plan, options.study, launcher.keeps_failures());
  const auto candidates = ask_trainer(plan, options);
  for (const std::string& warning : cautions(plan, candidates))
    Progress().log("warning: " + warning);
  ask_tasks(plan, candidates, options);
  check_runs(plan, candidates, options.study);
  const bool shared = options.slurm.has_value();
  Store store(options.study, shared ? Database::Mode::write_shared : Database::Mode::write);
  folder.keep();
  measure_overlap(candidates, store);
  const auto tuning = tuning_runs(plan, candidates, options.study);
  Outcome outcome;
  Rates rates;
  const auto is_done = [&](const PlannedRun& run) {
    return store.status(run.key) == status::kDone;
  };
  if (!tuning.empty()) {
    write_configs(tuning);
    store.set_plan(plan, tuning);
    explain(reusable, distinct(tuning), is_done);
    add(outcome, Runner(options, distinct(tuning), store, reusable, launcher).run());
    if (outcome.in_queue > 0) return outcome;
    rates = best_rates(plan, tuning, [&](const PlannedRun& run) -> std::optional<run::End> {
      if (store.status(run.key) != status::kDone) return {};
      return store.finished(run.key).end;
    });
    drop_tuning_failures(outcome, tuning, rates);
  }
  const auto runs = study_runs(plan, candidates, rates, options.study);
  std::vector<PlannedRun> all = tuning;
  all.insert(all.end(), runs.begin(), runs.end());
  write_configs(runs);
  store.set_plan(plan, all);
  explain(reusable, distinct(runs), is_done);
  add(outcome, Runner(options, distinct(runs), store, reusable, launcher).run());
  if (outcome.in_queue > 0) return outcome;
  outcome.task_failures = evaluate_tasks(plan, runs, options, store);
  return outcome;
}

}  // namespace

Outcome run_plan(const StudyOptions& options) {
  if (!options.slurm) return run_plan_with(*local_launcher(options), options);
  SlurmLauncher slurm(options);
  slurm.wait_for_controller();
  for (;;) {
    Outcome outcome = run_plan_with(slurm, options);
    if (outcome.in_queue == 0 || !options.slurm->wait) return outcome;
    slurm.watch();
  }
}

std::vector<ExpectedRun> dry_run(const StudyOptions& options) {
  Plan plan = read_plan(options.plan, options.set);
  const Results results(options);
  const StudyFolder folder(plan, options.study);  // what is made for questions is not kept
  const auto candidates = ask_trainer(plan, options);
  for (const std::string& warning : cautions(plan, candidates))
    Progress().log("warning: " + warning);
  ask_tasks(plan, candidates, options);
  check_runs(plan, candidates, options.study);
  const auto tuning = tuning_runs(plan, candidates, options.study);
  Rates rates = best_rates(plan, tuning, [&](const PlannedRun& run) { return results.end(run); });
  for (const PlannedRun& run : tuning)
    if (results.folder(run).empty()) rates.erase({run.setting, run.model});
  for (const PlannedRun& run : tuning)
    rates.try_emplace({run.setting, run.model}, run.learning_rate);
  std::vector<ExpectedRun> runs;
  for (const auto& part : {tuning, study_runs(plan, candidates, rates, options.study)})
    for (const PlannedRun& run : part) runs.push_back({run, results.folder(run)});
  explain(results.reusable(), distinct({runs.begin(), runs.end()}),
          [&](const PlannedRun& run) { return !results.folder(run).empty(); });
  return runs;
}

void study_of_records(const RecordedPlan& plan, const Records& records, const std::string& origin,
                      const fs::path& study) {
  run::check_output_folder(study, study / "study.sqlite");
  make_folder(study);
  const FolderLock lock(study);
  Store store(study);
  store.set_records(plan, records, origin);
}

void study_of_records(const fs::path& folder, const fs::path& study) {
  if (!fs::exists(folder / "plan.json"))
    fail("{}: holds neither a study (study.sqlite) nor records with their plan.json",
         folder.string());
  const auto plan = read_record<RecordedPlan>(folder / "plan.json");
  const Records records = read_records(folder);
  if (std::error_code none; fs::equivalent(folder, study, none))
    fail(
        "{}: The report of a folder of records needs a folder of its own. "
        "Nothing was changed.",
        folder.string());
  study_of_records(plan, records, folder.string(), study);
}

}  // namespace assay::study
