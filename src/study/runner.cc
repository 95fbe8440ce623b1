#include "study/runner.h"

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <thread>

#include "base/interrupt.h"
#include "base/progress.h"
#include "study/process.h"
#include "study/run_folder.h"

namespace assay::study {
namespace {

constexpr int kRestarts = 2;
using Clock = std::chrono::steady_clock;

struct Running {
  PlannedRun run;
  fs::path folder;
  pid_t child;
  size_t slot;
  int restarts;
  double tokens_before;  // seen when it was started or resumed
};

class Runner {
 public:
  Runner(const StudyOptions& options, std::vector<PlannedRun> runs, Store& store)
      : options_(options), store_(store), begun_(Clock::now()) {
    for (size_t slot = 0; slot < size_t(std::max<int64_t>(1, options.jobs)); ++slot) free_slots_.push_back(slot);
    outcome_.planned = int64_t(runs.size());
    for (PlannedRun& run : runs)
      if (!done_before(run)) queue_.push_back({std::move(run), 0});
    for (const auto& [run, restarts] : queue_) work_left_ += work(run, double(run.estimate.value("tokens", 0.0)));
  }

  Outcome run() {
    while (!running_.empty() || (!queue_.empty() && !stopping_)) {
      if (interrupted() && !stopping_) stop();
      if (!stopping_) fill();
      reap();
      if (Clock::now() >= next_status_) show_status();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    if (stopping_)
      fail<Interrupted>("interrupted: {} of {} runs done, the others saved. The same command continues them.",
                        outcome_.done, outcome_.planned);
    return outcome_;
  }

 private:
  bool done_before(const PlannedRun& run) {
    const fs::path folder = run.folder(options_.study);
    if (store_.status(run.key) != "done") {
      if (!fs::exists(folder / "done.json")) return false;
      store_.take(run.key, folder);  // it ended while no runner watched
    }
    ++outcome_.done, ++outcome_.done_before;
    return true;
  }

  void fill() {
    while (!queue_.empty() && !free_slots_.empty()) {
      auto [run, restarts] = std::move(queue_.front());
      queue_.pop_front();
      launch(std::move(run), restarts);
    }
  }

  void launch(PlannedRun run, int restarts) {
    const fs::path folder = run.folder(options_.study);
    make_folder(folder);
    const bool resume = begin_or_resume(folder);
    const size_t slot = free_slots_.front();
    free_slots_.pop_front();
    Command command{{trainer(options_), "train", run.config, "--data", run.data, "-o", folder}, folder / "log.txt", {}};
    if (resume) command.arguments.push_back("--resume");
    const auto place = placement(options_, slot);
    command.arguments.insert(command.arguments.end(), place.begin(), place.end());
    store_.set_status(run.key, "running");
    const double before = last_training_line(folder).value("tokens", 0.0);
    running_.push_back({std::move(run), folder, start(command), slot, restarts, before});
  }

  void reap() {
    for (size_t i = 0; i < running_.size();) {
      Ending ending;
      if (!ended(running_[i].child, ending)) {
        ++i;
        continue;
      }
      const Running over = std::move(running_[i]);
      running_.erase(running_.begin() + int64_t(i));
      free_slots_.push_front(over.slot);
      conclude(over, ending);
    }
  }

  void conclude(const Running& over, const Ending& ending) {
    if (ending.code == 0) return finish(over);
    if (stopping_ && (ending.killed || ending.code == kInterrupted))
      return store_.set_status(over.run.key, "interrupted");
    if (ending.killed && over.restarts < kRestarts) {
      progress_.log(fmt::format("{}: {}; resuming it", over.run.name, ending.text()));
      return queue_.push_front({over.run, over.restarts + 1});
    }
    give_up(over, fmt::format("{}: {}", ending.text(), last_line(over.folder / "log.txt")));
  }

  void finish(const Running& over) {
    try {
      store_.take(over.run.key, over.folder);
    } catch (const Error& error) {
      return give_up(over, fmt::format("it ended well, but its results cannot be read: {}", error.what()));
    }
    ++outcome_.done;
    work_done_ += work(over.run, over.run.estimate.value("tokens", 0.0) - over.tokens_before);
    progress_.log(
        fmt::format("{}/{} done: {}, {}", outcome_.done, outcome_.planned, over.run.name, summary(over.folder)));
  }

  void give_up(const Running& over, const std::string& reason) {
    store_.set_status(over.run.key, "failed", reason);
    outcome_.failures.push_back({over.run.name, reason, over.folder / "log.txt"});
    work_left_ -= work(over.run, over.run.estimate.value("tokens", 0.0) - over.tokens_before);
    progress_.log(fmt::format("failed: {}: {}", over.run.name, reason));
  }

  void stop() {
    stopping_ = true;
    progress_.log(fmt::format("interrupted; {} runs are saving", running_.size()));
    for (const Running& running : running_) ::kill(running.child, SIGINT);
  }

  void show_status() {
    progress_.show(status());
    next_status_ = Clock::now() + std::chrono::seconds(1);
  }

  std::string status() const {
    std::vector<std::string> parts;
    double work_now = work_done_;
    for (const Running& running : running_) {
      const Json line = last_training_line(running.folder);
      work_now += work(running.run, std::max(0.0, line.value("tokens", 0.0) - running.tokens_before));
      if (parts.size() < 3) parts.push_back(describe(running, line));
    }
    if (running_.size() > 3) parts.push_back(fmt::format("{} more", running_.size() - 3));
    const double seconds = std::chrono::duration<double>(Clock::now() - begun_).count();
    const std::string left =
        work_now > 0 && !stopping_
            ? Progress::duration(seconds * std::max(0.0, work_left_ - work_now) / work_now) + " left"
            : "";
    return fmt::format("{}/{} done  {}  {}", outcome_.done, outcome_.planned, join(parts, "  "), left);
  }

  static std::string describe(const Running& running, const Json& line) {
    if (!line.contains("step")) return running.run.name + " starting";
    return fmt::format("{} step {}/{} loss {:.3f} {} tokens/s", running.run.name, line["step"].get<int64_t>(),
                       running.run.estimate.value("steps", int64_t{0}), line.value("loss", 0.0),
                       Progress::count(line.value("tokens_per_second", 0.0)));
  }
  static double work(const PlannedRun& run, double tokens) {
    return tokens * run.estimate.value("flops_per_token", 1.0);
  }

  const StudyOptions& options_;
  Store& store_;
  Clock::time_point begun_, next_status_{};
  std::deque<std::pair<PlannedRun, int>> queue_;  // with the number of restarts so far
  std::deque<size_t> free_slots_;
  std::vector<Running> running_;
  Outcome outcome_;
  Progress progress_;
  double work_left_ = 0, work_done_ = 0;  // FLOPs: all that this call has to do; of runs that ended
  bool stopping_ = false;
};

}  // namespace

Outcome run_plan(const StudyOptions& options) {
  const Plan plan = read_plan(options.plan, options.set);
  make_folder(options.study);
  const FolderLock lock(options.study);
  const auto runs = prepare(plan, options);
  Store store(options.study);
  store.set_plan(plan, runs);
  return Runner(options, runs, store).run();
}

std::vector<PlannedRun> dry_run(const StudyOptions& options) {
  const Plan plan = read_plan(options.plan, options.set);
  make_folder(options.study);
  const FolderLock lock(options.study);
  return prepare(plan, options);
}

}  // namespace assay::study
