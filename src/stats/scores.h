#pragma once
// Scores of models on the items of a task, with several runs (seeds) per model. All runs answer the
// same items. Derivation and simulated coverage: docs/statistics.md.
//   score of run s             r_s = Σ_i y_si / Σ_i t_i          (t_i = 1: a mean over items)
//   influence of item i on it  u_si, whose squares add up to the variance of r_s over items
//   score of a model           r = mean of r_s,   u_i = mean of u_si
//   V(r) = S + D,  S = σ² / n,  D = max(0, Σ_i u_i² − I / n)     for n runs
// σ²: variance between runs of one model. I: the part of it that the noise of a run on single items
// makes; it is in S and in Σ u_i², and it is counted once. Both are pooled over the models.
#include <span>
#include <vector>

#include "stats/uncertainty.h"

namespace assay::stats {

struct RunScore {
  double value = 0;
  std::vector<double> influence;  // of each item
};
using RunScores = std::vector<RunScore>;  // of one model, by seed; same items in the same order

// `weights` is empty or has one weight per item.
RunScore run_score(std::span<const double> values, std::span<const double> weights = {});
// The mean over several tasks, whose items are independent.
RunScore mean_score(std::span<const RunScore> tasks);

struct SeedNoise {
  Variance between{};      // σ² with its degrees of freedom; 0 degrees: no model has two runs
  double interaction = 0;  // I
};
SeedNoise seed_noise(std::span<const RunScores> models);

enum class ScoreKind { share, number };  // share: every y_i is 0 or 1, or the mean over such tasks

// A share: Wilson's score interval at the effective number of items n* = r (1 − r) / V [Korn and
// Graubard 1998; Franco et al. 2019], with Student's t where seeds count; with one run per model it
// is share_interval() of items.h. n* is the number of items where r is 0 or 1.
// A number: r ± t √V.
Interval score_interval(const RunScores& runs, const SeedNoise& noise, ScoreKind kind,
                        double level = 0.95);
// a − b, paired by item. For shares one item is added to each kind of disagreement [Bonett and
// Price 2012]; with one run per model it is paired_share_difference() of items.h.
Interval score_difference(const RunScores& a, const RunScores& b, const SeedNoise& noise,
                          ScoreKind kind, double level = 0.95);

}  // namespace assay::stats
