#include "tasks/mqar_runner.h"

#include <signal.h>

#include <chrono>
#include <deque>
#include <thread>

#include "base/interrupt.h"
#include "base/progress.h"
#include "study/database.h"
#include "study/process.h"
#include "study/run_folder.h"
#include "train/device.h"

namespace assay::tasks {
namespace {

using Json = nlohmann::json;

c10::DeviceType type_of(const std::vector<std::string>& devices) {
  if (devices.empty()) return train::choose_device("auto").type();
  const c10::DeviceType type = train::choose_device(devices.front()).type();
  for (const std::string& device : devices)
    if (train::choose_device(device).type() != type)
      fail("--devices {}: runs on the CPU and on CUDA are not comparable. Nothing was run.",
           join(devices, ","));
  return type;
}

class MqarRunner {
 public:
  MqarRunner(const MqarStudy& study, const study::StudyOptions& options)
      : study_(study),
        options_(options),
        device_(type_of(options.devices)),
        database_(options.study / "mqar.sqlite", study::Database::Mode::write) {
    database_.execute(
        "CREATE TABLE IF NOT EXISTS runs (key TEXT PRIMARY KEY, result TEXT NOT NULL)");
    make_folder(options.study / "logs");
    for (size_t slot = 0; slot < size_t(options.jobs); ++slot) free_slots_.push_back(slot);
    for (size_t first = study.runs.size(); first > 0;) {
      first -= rates();
      queue_next(first, first);
    }
  }

  MqarOutcome run() {
    while (!running_.empty() || (!queue_.empty() && !outcome_.interrupted)) {
      if (interrupted() && !outcome_.interrupted) stop();
      while (!outcome_.interrupted && !queue_.empty() && !free_slots_.empty()) launch();
      reap();
      show();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return std::move(outcome_);
  }

 private:
  struct Running {
    size_t number;
    pid_t child;
    size_t slot;
  };

  size_t rates() const { return study_.plan.learning_rates.size(); }

  // Hash of everything that decides the result of a run.
  std::string key(size_t number) const {
    const MqarRun& run = study_.runs[number];
    const MqarPlan& plan = study_.plan;
    const char* dtype = c10::toString(train::compute_dtype(plan.precision, device_));
    return sha256(Json{run.toml, run.data.length, run.data.pairs, run.data.power,
                       run.data.random_non_queries, run.learning_rate, plan.train_examples,
                       plan.test_examples, plan.epochs, plan.batch_size, plan.seed,
                       plan.weight_decay, plan.stop_at, dtype}
                      .dump());
  }
  std::string name(size_t number) const {
    const MqarRun& run = study_.runs[number];
    return fmt::format("{}, width {}, length {}, learning rate {}", run.model, run.width,
                       run.data.length, run.learning_rate);
  }
  fs::path file(size_t number, const char* ending) const {
    return options_.study / "logs" / (key(number).substr(0, 16) + ending);
  }

  // Takes stored results from run `number` on, and puts the first run without one in front of the
  // queue. `first` is the run with the first learning rate.
  void queue_next(size_t first, size_t number) {
    for (; number < first + rates(); ++number) {
      const auto stored = database_.query("SELECT result FROM runs WHERE key = ?", {key(number)});
      if (stored.empty()) return queue_.push_front(number);
      const Json result = Json::parse(stored[0]["result"].get<std::string>());
      outcome_.results[number] = result;
      if (result["accuracy"] >= study_.plan.stop_at) return;
    }
  }

  void launch() {
    const size_t number = queue_.front();
    const size_t slot = free_slots_.front();
    queue_.pop_front();
    free_slots_.pop_front();
    study::Command command{{study::trainer(options_), "eval", "mqar", options_.plan, "-o",
                            options_.study, "--run", std::to_string(number), "--json"},
                           file(number, ".json"),
                           file(number, ".log")};
    for (const fs::path& old : {command.output, command.errors}) fs::remove(old);
    const auto place = study::placement(options_, slot);
    command.arguments.insert(command.arguments.end(), place.begin(), place.end());
    running_.push_back({number, study::start(command), slot});
  }

  void reap() {
    for (size_t i = 0; i < running_.size();) {
      study::Ending ending;
      if (!study::ended(running_[i].child, ending)) {
        ++i;
        continue;
      }
      const Running over = running_[i];
      running_.erase(running_.begin() + int64_t(i));
      free_slots_.push_front(over.slot);
      conclude(over.number, ending);
    }
  }

  void conclude(size_t number, const study::Ending& ending) {
    const fs::path output = file(number, ".json");
    const Json answer = Json::parse(read_file(output), nullptr, /*allow_exceptions=*/false);
    fs::remove(output);
    if (ending.code == 0 && answer.is_object()) {
      database_.query("INSERT OR REPLACE INTO runs VALUES (?, ?)", {key(number), answer.dump()});
      progress_.log(fmt::format("{}: accuracy {:.3f} after {} epochs, {}", name(number),
                                answer["accuracy"].get<double>(), answer["epochs"].get<int64_t>(),
                                Progress::duration(answer["seconds"])));
      return queue_next(number - number % rates(), number);
    }
    if (outcome_.interrupted && ending.stopped_from_outside()) return;
    const bool explained = answer.is_object() && answer.contains("error");
    const std::string reason = explained ? answer["error"].get<std::string>() : ending.text();
    outcome_.failures.push_back({name(number), reason, file(number, ".log")});
    progress_.log(fmt::format("failed: {}: {}", name(number), reason));
  }

  void stop() {
    outcome_.interrupted = true;
    for (const Running& running : running_) ::kill(running.child, SIGTERM);
  }

  void show() {
    const auto now = std::chrono::steady_clock::now();
    if (running_.empty() || now < next_status_) return;
    next_status_ = now + std::chrono::seconds(1);
    progress_.show(fmt::format("{} of {} runs done, {} in progress: {}", outcome_.results.size(),
                               study_.runs.size(), running_.size(),
                               study::last_line(file(running_.front().number, ".log"))));
  }

  const MqarStudy& study_;
  const study::StudyOptions& options_;
  const c10::DeviceType device_;
  study::Database database_;
  std::deque<size_t> queue_;  // places in study_.runs
  std::deque<size_t> free_slots_;
  std::vector<Running> running_;
  MqarOutcome outcome_;
  Progress progress_;
  std::chrono::steady_clock::time_point next_status_{};
};

}  // namespace

MqarOutcome run_mqar(const MqarStudy& study, const study::StudyOptions& options) {
  return MqarRunner(study, options).run();
}

}  // namespace assay::tasks
