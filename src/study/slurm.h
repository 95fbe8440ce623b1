#pragma once
// Runs of a study as tasks of Slurm's job arrays, and controller jobs that continue the study.
//
// A controller job waits for the arrays (--dependency=afterany), gives the command of the study
// again, and ends: it takes results, submits what comes next and another controller job, or writes
// the report. So no process has to live as long as the study.
//
//   STUDY/slurm/N.json          the tasks of the N-th array; written before it is submitted
//   STUDY/slurm/N.sh            its script
//   STUDY/slurm/N.TASK.log      what Slurm says about a task; ends with "exit code C"
//   STUDY/slurm/RUN.toml        configuration of a run, which later changes of the plan leave alone
//   STUDY/slurm/controller.sh, controller.log
//
// The N-th array is named TAG.N and controller jobs are named TAG. TAG is made from the path of the
// study, so Slurm's queue alone tells which jobs exist, whatever happened to the processes that
// submitted them.
#include <map>
#include <set>

#include "base/progress.h"
#include "study/launcher.h"

namespace assay::study {

class SlurmLauncher final : public Launcher {
 public:
  // BadInput when this host has no sbatch, or an option is one that the launcher sets itself.
  explicit SlurmLauncher(const StudyOptions& options);

  void look_around() override;
  std::optional<int> started_earlier(const PlannedRun& run) override;
  void start(const PlannedRun& run, int restarts) override;
  std::optional<Ending> ended(const PlannedRun& run) override;
  void stop() override {}  // jobs that were submitted go on
  bool is_detached() const override { return true; }
  // Submits the runs that were started, and a controller job. Error with the words of sbatch when
  // it refuses.
  void leave() override;
  bool keeps_failures() const override { return continues_; }

  // Waits until no controller job is at work on the study, except this process.
  void wait_for_controller();
  // Shows progress until no job of the study is in the queue; later calls of the runner continue
  // the study. Interrupted after Ctrl-C: the jobs stay in the queue.
  void watch();

  // The script and the commands that submit these runs, for reading.
  std::string preview(const std::vector<PlannedRun>& runs) const;

 private:
  struct Job {
    // "120_3", "120"
    std::string id;
    std::string array;
    int64_t task;  // index in the array; -1: a controller job
    std::string state;
    std::string reason;
    std::string name;
    bool is_active() const;   // in the queue, or running
    bool is_at_work() const;  // neither queued nor ended
  };
  // A run as a task of the newest array that lists it.
  struct Task {
    std::string run;  // name of the folder
    int64_t array = 0;
    int64_t index = 0;
    int64_t restarts = 0;
    int64_t steps = 0;
    bool is_active = false;
    // of the job; "" when Slurm no longer knows it
    std::string id = {};
    std::string state = {};
  };

  std::vector<Job> jobs() const;
  std::map<std::string, Task> tasks(const std::vector<Job>& jobs) const;
  Ending ending(const Task& task);
  std::string state_in_accounting(const Task& task);
  std::string array_script(const std::vector<PlannedRun>& runs) const;
  std::vector<std::string> array_command(int64_t number, size_t tasks) const;
  std::vector<std::string> controller_command(const std::set<std::string>& arrays) const;
  std::string controller_script() const;
  void submit_array(const std::vector<std::pair<PlannedRun, int>>& runs);
  void submit_controller();
  void log_finished(const std::map<std::string, Task>& tasks);
  static std::string text_about_jobs(const std::vector<Job>& jobs);
  std::string status(const std::map<std::string, Task>& tasks, const std::vector<Job>& jobs) const;

  const StudyOptions& options_;
  // absolute; folder_: study/slurm
  fs::path study_;
  fs::path folder_;
  std::string tag_;
  std::optional<int64_t> own_job_;     // the job that this process is part of
  bool continues_;                     // what another process, or an earlier call, began
  std::map<std::string, Task> tasks_;  // by name of the run's folder
  std::vector<std::pair<PlannedRun, int>> to_submit_;             // with restarts
  std::optional<std::map<std::string, std::string>> accounting_;  // states by "NAME INDEX"
  std::set<std::string> told_;  // finished runs that watch() has named
  Progress progress_;
};

}  // namespace assay::study
