#pragma once
// Runs a plan: one process or one job of Slurm per run, several at a time. The runner is the only
// writer of study.sqlite, and can be stopped and started at any moment: what is done is not done
// again, what was begun is resumed.
#include "study/prepare.h"

namespace assay::study {

struct Failure {
  std::string name;
  std::string reason;
  fs::path log;
};
struct Outcome {
  // `done` includes those done before; `done_before` includes those reused from other studies.
  // `in_queue` are jobs of Slurm that were left when this process did not wait.
  int64_t planned = 0;
  int64_t done = 0;
  int64_t done_before = 0;
  int64_t reused = 0;
  int64_t in_queue = 0;
  std::vector<Failure> failures;       // of training
  std::vector<Failure> task_failures;  // of evaluations of tasks
};

// A run that a signal killed, or made save and leave, is resumed, twice at most. A failed run does
// not stop the others. Throws Interrupted after Ctrl-C, when every run has saved. BadInput when
// another process works on the study. With Slurm, Ctrl-C leaves the jobs in the queue.
Outcome run_plan(const StudyOptions& options);

// A run that run_plan would train, or that has finished.
struct ExpectedRun : PlannedRun {
  std::string found;  // folder that holds its results, of this study or to reuse; "" for none
};
// The runs of run_plan, without training. Leaves nothing in the folder of the study. The runs of
// models whose learning rate is still to be tuned have the first rate of the grid.
std::vector<ExpectedRun> dry_run(const StudyOptions& options);

// Writes the records of a study's finished runs and its plan into a folder, from which the study
// can be reported or its runs reused. Records that a folder of `elsewhere` holds are not written
// again; plan.json names these folders relative to `folder`. Returns the number of records written.
int64_t write_records(const fs::path& study, const fs::path& folder,
                      const std::vector<fs::path>& elsewhere = {});
// A study without runs of its own, from records. BadInput when `study` is a study that was not made
// from records.
void study_of_records(const RecordedPlan& plan, const Records& records, const std::string& origin,
                      const fs::path& study);
// Makes a study of such a folder, without runs of its own. BadInput when `study` is the folder of
// records or a study that was not made from records.
void study_of_records(const fs::path& folder, const fs::path& study);

}  // namespace assay::study
