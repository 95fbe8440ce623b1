#pragma once
// Does a difference found at small budgets hold at a larger one? A prediction is made from small
// budgets only, and is then compared with the difference measured later.
//   prediction = sum_j l_j Delta_j,   with one budget j: Delta_j (no growth is assumed),
//                                     with more: their regression line in log2 tokens
// Budgets with a caveat (ladder.h) are left out, unless all smaller budgets of the contender have
// one. The interval is meant to hold the Delta_end that will be measured, with the noise of its own
// runs. It has no term for the documents, because the later runs are evaluated on the same ones.
#include <span>
#include <string>
#include <vector>

#include "stats/ladder.h"

namespace assay::stats {

struct PredictionOptions {
  double below_tokens = 0;   // only the contenders' budgets below this are used
  double target_tokens = 0;  // the budget that is predicted
  double level = 0.9;
  int64_t seeds = 2;       // of the run that is predicted
  LadderOptions limits{};  // for the caveats, and the table of variances; its level is not used
};

struct Prediction {
  std::string name;
  std::string problem;  // why nothing is predicted; empty otherwise
  int64_t budgets = 0;  // used; one means that no growth is assumed
  double largest = 0;   // tokens of the largest budget used
  double target_tokens = 0;
  Interval delta{};
};

// One prediction per contender. Throws BadInput as compare_ends does.
std::vector<Prediction> predict_ends(const std::vector<Budget>& ladder,
                                     const std::vector<Contender>& contenders,
                                     const PredictionOptions& options);

// Kendall's rank correlation tau-b of two lists of one length; NaN when one of them is constant.
double kendall_tau(std::span<const double> x, std::span<const double> y);
// τ with an interval over the pairs as a sample, by Fisher's transformation with the variance
// 0.437 / (n − 4) [Fieller, Hartley and Pearson 1957]. In the transformation |τ| is at most
// 1 − 2 / (n (n − 1)), half a pair from a perfect order. NaN for fewer than kFewestRanks pairs.
constexpr size_t kFewestRanks = 5;
Interval kendall_interval(std::span<const double> x, std::span<const double> y,
                          double level = 0.95);

}  // namespace assay::stats
