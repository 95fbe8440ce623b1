#pragma once
// The primary comparison: the ends of runs against the ladder of the reference (stats/ladder.h).
// In the mixed-domain setting the held-out loss of the comparison is the training loss at the end,
// and the domains are the held-out sets of the training domains.
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "stats/ladder.h"
#include "stats/verdict.h"
#include "study/plan.h"

namespace assay::report {

struct Setting;

// The reference's side of the comparison.
struct Ladder {
  std::vector<stats::Budget> budgets;
  std::string problem;  // why no architecture can be compared; empty otherwise
  std::string advice;   // what to add to the plan where there is a problem
  std::vector<std::string> warnings;
  double critical = 1;           // see stats::LadderResult
  stats::LadderOptions options;  // limits of the verdicts
  bool mature = false;
  bool clustered_by_source = false;                      // false: by document
  std::vector<double> recall;                            // by rung
  std::vector<std::pair<std::string, size_t>> clusters;  // by domain
};

// One architecture at half or twice its learning rate.
struct Check {
  std::string purpose;
  double learning_rate = 0;
  stats::EndResult end;
};

// Prediction of Δ_end at one budget of an architecture from its smaller budgets.
struct Foretold {
  std::string name;
  // largest budget that was used; the budget that is predicted
  double from = 0;
  double tokens = 0;
  stats::Interval predicted{};  // 90 %
  // 95 %, of this budget alone; absent when it was not trained
  std::optional<stats::Interval> measured;
  bool inside() const {
    return measured && predicted.low <= measured->estimate && measured->estimate <= predicted.high;
  }
};
// For every architecture with two budgets of which the larger one carries a verdict: that budget
// from the smaller ones. Then for every architecture: twice its largest budget, if the
// reference does not overfit there.
std::vector<Foretold> predictions(const Setting& setting);

// Sets setting.ladder, and `end`, `wide`, `tokens_ratio` and `checks` of every architecture.
void compare_ends(Setting& setting);

// The variances between the seeds of its architectures, at the budgets that can be compared.
std::vector<study::VarianceRow> seed_variances(const Setting& setting);

// One domain of a ladder.
std::vector<stats::Budget> only_domain(const std::vector<stats::Budget>& budgets,
                                       const std::string& domain);
// Loss of a run's end: one domain, or the mean over the domains when `domain` is empty.
double loss_of(const stats::End& end, const std::string& domain = "");

// "degraded", "better", "equivalent", "not worse", "not settled"
inline const char* word(stats::Verdict verdict) { return stats::verdict_name(verdict); }

}  // namespace assay::report
