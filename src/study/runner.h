#pragma once
// Runs a plan: one process a run, several at a time. The runner outlives its runs, is the only writer of study.sqlite,
// and can be stopped and started at any moment: what is done is not done again, what was begun is resumed.
#include "study/prepare.h"

namespace assay::study {

struct Failure {
  std::string name, reason;
  fs::path log;
};
struct Outcome {
  int64_t planned = 0, done = 0, done_before = 0;  // `done` includes those done before
  std::vector<Failure> failures;
};

// A run killed by a signal is resumed, twice at most. A failed run does not stop the others. Throws Interrupted after
// Ctrl-C, when every run has saved. BadInput when another process works on the study.
Outcome run_plan(const StudyOptions& options);

// What run_plan would do. Makes synthetic data and writes the configurations, trains nothing.
std::vector<PlannedRun> dry_run(const StudyOptions& options);

}  // namespace assay::study
