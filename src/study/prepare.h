#pragma once
// From a plan to runs that are known to start: data made or opened, every configuration accepted by the trainer.
#include "study/plan.h"
#include "study/store.h"

namespace assay::study {

struct StudyOptions {
  fs::path plan, study;
  std::vector<std::string> set;      // assignments over the plan's values: "train.steps=100"
  std::string data;                  // token store for every setting that names none; "" for none
  int64_t jobs = 1, threads = 0;     // runs at a time; threads of each, 0: the cores shared out
  std::vector<std::string> devices;  // handed out in turn; empty: the trainer's choice
  fs::path program;                  // whose `train` is run; empty: this program
};

// Writes study/configs/*.toml, makes synthetic data under study/data, and asks the trainer (--dry-run) about each model
// of each setting, options.jobs at a time. BadInput, in terms of the plan, when it refuses one; nothing is run then.
std::vector<PlannedRun> prepare(const Plan& plan, const StudyOptions& options);

fs::path trainer(const StudyOptions& options);
// Arguments that give the trainer its threads and its device, of the slot-th of options.jobs at a time.
std::vector<std::string> placement(const StudyOptions& options, size_t slot);

}  // namespace assay::study
