#pragma once
// The runs of a study by architecture and budget, and the comparisons with the reference.
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/files.h"
#include "report/ends.h"
#include "report/task_scores.h"
#include "report/tuning.h"
#include "stats/degradation.h"
#include "study/store.h"

namespace assay::report {

// The pre-training loss at which the secondary comparison along training is made.
enum class Kind { held_out, training };  // held-out text of the training domains; the training text
const char* name(Kind kind);             // "held-out", "training"

struct Evaluation {
  int64_t step = 0;
  double tokens = 0;  // seen so far
  // Centred on this step (run/training_loss.h); NaN at step 0
  double training_loss = 0;
  double held_out_loss = 0;                   // mean over the training domains
  double test_loss = 0;                       // mean over the test domains
  std::map<std::string, double> test_losses;  // by test domain
  run::EvaluatedSets sets;                    // by "cc.valid"
  run::Entropies attention_entropy;           // may be empty
  double mean_attention_entropy = 0;          // over layers and heads; NaN without softmax weights
  double pretraining_loss(Kind kind) const {
    return kind == Kind::training ? training_loss : held_out_loss;
  }
};

// Losses at the end, over more text than the evaluations along training (eval/end_losses.h).
struct RunEnd {
  double training_loss = 0;
  double held_out_loss = 0;
  double test_loss = 0;
  std::map<std::string, double> test_losses;
  double bits_per_byte = 0;  // mean over the test domains
};

struct Run {
  std::string name;
  int64_t seed = 0;
  int64_t tokens = 0;  // the budget
  double learning_rate = 0;
  run::FinishedRun data;
  std::vector<Evaluation> evaluations;
  RunEnd end;
};

// The secondary measure: the mean difference over the range of pre-training loss that runs of
// equal budget share.
struct Comparison {
  Kind kind = Kind::held_out;
  int64_t tokens = 0;  // the budget of both
  stats::Degradation degradation;
  stats::Convergence convergence;
  std::vector<std::pair<double, double>> profile;  // (pre-training loss, difference there)
};

struct Architecture {
  std::string name;
  int style = 0;  // 0 is the reference; 1, 2, … select colour and symbol in every figure
  std::map<int64_t, std::vector<Run>> budgets;  // runs with the purpose "study", by tokens
  bool comparable = true;   // false: other data or numerics versions than the reference
  stats::EndResult end;     // the primary comparison; not set for the reference
  stats::EndResult wide;    // the same with the further unseen domains; set if there are any
  double tokens_ratio = 0;  // tokens over those of the reference at equal held-out loss, or NaN
  std::map<std::string, std::vector<Run>> check_runs;  // by purpose: at other learning rates
  std::vector<Check> checks;                           // the primary comparison of check_runs
  std::vector<Comparison> comparisons;
  std::vector<std::string> warnings;  // reasons to doubt the comparison

  // Runs and tokens of the largest budget.
  const std::vector<Run>& runs() const { return budgets.rbegin()->second; }
  int64_t tokens() const { return budgets.rbegin()->first; }
  std::vector<const Run*> all_runs() const;
};

struct Setting {
  std::string name;  // "" when the study has one
  // domains; test = train in the mixed-domain setting
  std::vector<std::string> train;
  std::vector<std::string> test;
  std::vector<std::string> further;  // more unseen domains
  // split of the training domains; of the test domains
  std::string held_out;
  std::string split;
  bool mixed = false;               // nothing is out of domain
  bool has_planned_ladder = false;  // the plan has one, whether or not its runs have finished
  std::vector<Kind> kinds;          // of the secondary comparison
  Ladder ladder;
  std::vector<Grid> grids;                  // the learning rates that were tried, by model
  study::Overlap overlap;                   // of test and training text
  std::vector<Architecture> architectures;  // the reference first; those with a finished run
  std::vector<run::TaskQuestion> tasks;     // of the plan
  std::vector<TaskScores> task_scores;
  const Architecture& reference() const { return architectures.front(); }
  bool has_reference() const { return !architectures.empty() && reference().style == 0; }
  std::string set(const std::string& domain) const { return domain + "." + split; }
  std::string held_out_set(const std::string& domain) const { return domain + "." + held_out; }
  // `test` and `further`
  std::vector<std::string> unseen() const {
    std::vector<std::string> all = test;
    all.insert(all.end(), further.begin(), further.end());
    return all;
  }
  // Names of the two losses of a comparison.
  const char* pretraining_name() const { return mixed ? "training loss" : "held-out loss"; }
  const char* test_name() const { return mixed ? "held-out loss" : "loss out of domain"; }
};

struct Study {
  std::string name;
  std::string reference;
  std::string plan;  // its text
  std::vector<Setting> settings;
  std::vector<study::StudyRun> runs;  // all planned runs
};

Study analyse(const fs::path& folder);

// The runs of the largest budget that both have; empty where they share none.
using RunPair = std::pair<const std::vector<Run>*, const std::vector<Run>*>;
RunPair runs_of_equal_budget(const Architecture& a, const Architecture& b);

// Every hyper-parameter of an architecture and its value, ("model.d_model", "64"), in the order of
// its configuration; without the seed.
using Hyperparameters = std::vector<std::pair<std::string, std::string>>;
Hyperparameters hyperparameters(const Architecture& architecture);
// NaN for none.
double number(const auto& value) {
  return value ? double(*value) : std::numeric_limits<double>::quiet_NaN();
}

// Mean over runs; NaN for none.
template <class Get>
double mean_over(const std::vector<Run>& runs, Get&& get) {
  double sum = 0;
  for (const Run& run : runs) sum += get(run);
  return runs.empty() ? std::numeric_limits<double>::quiet_NaN() : sum / double(runs.size());
}

}  // namespace assay::report
