#include <signal.h>

#include <deque>
#include <map>

#include "study/launcher.h"
#include "study/run_folder.h"

namespace assay::study {
namespace {

class LocalLauncher final : public Launcher {
 public:
  explicit LocalLauncher(const StudyOptions& options) : options_(options) {
    for (size_t slot = 0; slot < size_t(std::max<int64_t>(1, options.jobs)); ++slot)
      free_slots_.push_back(slot);
  }

  bool is_full() const override { return free_slots_.empty(); }

  void start(const PlannedRun& run, int) override {
    const run::Folder folder = run.folder(options_.study);
    const bool resume = begin_or_resume(folder);
    const size_t slot = free_slots_.front();
    free_slots_.pop_front();
    Command command{training(run, options_), folder.log(), {}};
    if (resume) command.arguments.push_back("--resume");
    const auto place = placement(options_, slot);
    command.arguments.insert(command.arguments.end(), place.begin(), place.end());
    children_[run.key] = {study::start(command), slot};
  }

  std::optional<Ending> ended(const PlannedRun& run) override {
    const auto child = children_.find(run.key);
    Ending ending;
    if (!study::ended(child->second.process, ending)) return std::nullopt;
    free_slots_.push_front(child->second.slot);
    children_.erase(child);
    return ending;
  }

  void stop() override {
    for (const auto& [key, child] : children_) ::kill(child.process, SIGINT);
  }

 private:
  struct Child {
    pid_t process;
    size_t slot;
  };
  const StudyOptions& options_;
  std::deque<size_t> free_slots_;
  std::map<std::string, Child> children_;  // by key of the run
};

}  // namespace

std::unique_ptr<Launcher> local_launcher(const StudyOptions& options) {
  return std::make_unique<LocalLauncher>(options);
}

}  // namespace assay::study
