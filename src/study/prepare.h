#pragma once
// From a plan to runs that are known to start: data made or opened, every configuration accepted
// by the trainer.
#include <map>
#include <optional>
#include <utility>

#include "study/plan.h"
#include "study/store.h"

namespace assay::study {

// How runs become jobs of Slurm.
struct SlurmOptions {
  std::vector<std::string> sbatch;      // options of sbatch for the runs
  std::vector<std::string> controller;  // and for controller jobs; empty: the same
  std::vector<std::string> command;     // of a controller job: continues the study, does not wait
  int64_t tasks_at_a_time = 0;          // 0: as many as Slurm starts
  bool wait = true;                     // for the end of the study
};

struct StudyOptions {
  fs::path plan;
  fs::path study;
  std::vector<std::string> set;  // assignments over the plan's values: "train.steps=100"
  std::string data;              // token store for every setting that names none; "" for none
  // runs at a time; threads of each, 0: the cores shared out
  int64_t jobs = 1;
  int64_t threads = 0;
  std::vector<std::string> devices;        // handed out in turn; empty: the trainer's choice
  fs::path program;                        // whose `train` is run; empty: this program
  std::vector<fs::path> reuse;             // folders with records of finished runs, or studies
  std::optional<SlurmOptions> slurm = {};  // none: the runs are processes of this machine
};

// One model in one setting that the trainer has accepted.
struct Candidate {
  const Model* model;
  const Setting* setting;
  fs::path data;         // token store
  run::Estimate answer;  // of `assay train --dry-run`
};

// The folders of the synthetic data of a plan, whether they exist or not.
std::vector<fs::path> synthetic_stores(const Plan& plan, const fs::path& study);

// Makes synthetic data under study/data, and asks the trainer (--dry-run) about each model of each
// setting, options.jobs at a time. BadInput, in terms of the plan, when it refuses one; nothing is
// run then. The files of the questions in study/configs are removed. The candidates point into
// `plan`.
std::vector<Candidate> ask_trainer(const Plan& plan, const StudyOptions& options);

// More epochs of the training text bias the comparison at equal held-out loss (docs/statistics.md).
inline constexpr double kMostEpochs = 1.5;
// A sentence if a reference whose longest run reads so many tokens of real text is unlikely to give
// a verdict, or "". References began to recall after 41M to 82M tokens (docs/statistics.md,
// maturity).
std::string caution_about(double tokens);
// A sentence if `run` reads its training text more than kMostEpochs times, or "".
std::string caution_about_epochs(const std::string& run, double epochs);
// Sentences about verdicts that will be biased or missing: the plan has no ladder, no contender has
// two seeds, a run is very short, the longest run of a setting repeats its text, or caution_about()
// has one about the longest run of the reference.
std::vector<std::string> cautions(const Plan& plan, const std::vector<Candidate>& candidates);

// The learning rate of each model, by setting and model; absent where the grid gave none.
using Rates = std::map<std::pair<std::string, std::string>, double>;
// The runs that choose learning rates; empty without `tune`.
std::vector<PlannedRun> tuning_runs(const Plan& plan, const std::vector<Candidate>& candidates,
                                    const fs::path& study);
// The runs that answer the plan's question, and those that check it at other learning rates. Models
// that are tuned and have no rate are left out. BadInput when two runs are the same.
std::vector<PlannedRun> study_runs(const Plan& plan, const std::vector<Candidate>& candidates,
                                   const Rates& rates, const fs::path& study);

// BadInput when two runs of the plan are the same or would have the same name, whatever learning
// rates the tuning chooses. Writes nothing.
void check_runs(const Plan& plan, const std::vector<Candidate>& candidates, const fs::path& study);
// Writes the configurations of the runs to study/configs.
void write_configs(const std::vector<PlannedRun>& runs);

fs::path trainer(const StudyOptions& options);
// The trainer's command line for a run, without --resume and placement.
std::vector<std::string> training(const PlannedRun& run, const StudyOptions& options);
// Arguments that give the trainer its threads and its device, of the slot-th of options.jobs
// at a time.
std::vector<std::string> placement(const StudyOptions& options, size_t slot);

}  // namespace assay::study
