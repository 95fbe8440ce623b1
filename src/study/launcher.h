#pragma once
// Where the runs of a study are trained: as processes of this machine, or as jobs of Slurm.
#include <memory>
#include <optional>

#include "study/prepare.h"
#include "study/process.h"

namespace assay::study {

class Launcher {
 public:
  virtual ~Launcher() = default;
  // Is called before the first run of a list.
  virtual void look_around() {}
  // The restarts so far of a run that an earlier process started and whose end was not told yet:
  // start() is not called for it. None for other runs.
  virtual std::optional<int> started_earlier(const PlannedRun&) { return std::nullopt; }
  virtual bool is_full() const { return false; }  // takes no run before another has ended
  // Starts the run, or resumes it when it has a checkpoint. Its folder exists.
  virtual void start(const PlannedRun& run, int restarts) = 0;
  // None while the run is in progress. Does not wait. Tells each end once.
  virtual std::optional<Ending> ended(const PlannedRun& run) = 0;
  virtual void stop() = 0;  // asks every run to save and end
  // Do the runs go on when this process ends? If so, they begin when the process leaves them.
  virtual bool is_detached() const { return false; }
  virtual void leave() {}
  // A failed run is not tried again: this process continues what another one began.
  virtual bool keeps_failures() const { return false; }
};

std::unique_ptr<Launcher> local_launcher(const StudyOptions& options);

}  // namespace assay::study
