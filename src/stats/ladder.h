#pragma once
// Three numbers about an architecture a, from the ends of runs that were trained through their
// complete schedule, against a ladder of the reference: several budgets, several seeds each. [BC 2]
//   Delta_end = o(a) - f(h(a))                        equal held-out loss
//   E         = (o(a) - O_B) - s_B (h(a) - H_B)       equal tokens
//   R         = (r(a) - r_B) - t_B (h(a) - H_B)       equal tokens, recall in domain
// h: held-out loss of the training domains; o: loss out of domain; r: mean over the training
// domains of the held-out loss per recall target. Capitals: the reference at the rung B with the
// tokens of a. All are means over the seeds, in nats.
// f(h): out-of-domain loss that the reference ends with when it ends with held-out loss h, read
// between the rungs (interpolation.h) and never extrapolated.
// s_B, t_B: slope of the reference's o and r over its h at rung B: of the parabola through B and
// its neighbours if both segments next to B are usable, or of the one usable segment. A segment
// is usable if the reference is mature between its rungs and, for s_B, does not overfit or
// memorise there.
// E and R of an architecture are means over its budgets, weighted by their runs.
//
// Intervals count the seeds of both sides, the documents (the same in every run, in clusters of one
// source), those of the held-out text as well, and for E and R a model error of the slope with the
// standard deviation |s - slope of the adjacent segment| / 2 (the largest), or |s| / 2 if there is
// no other segment. Every rung has its own variance between seeds. Contenders share one, pooled
// over their usable budgets and over LadderOptions::variances. The intervals `delta` and
// EqualTokens::value hold for all contenders of one call together, each number by itself.
// Derivation and simulated coverage: docs/statistics.md.
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "stats/uncertainty.h"

namespace assay::stats {

// The conditions are in verdict.h. not_worse: the upper end of the interval is below the margin.
enum class Verdict { degraded, better, equivalent, not_worse, not_settled };

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
constexpr Interval kNoEstimate{kUnknown, kUnknown, kUnknown};

// Losses of one domain at the end of a run, by cluster. A cluster is the source of a document;
// without sources each document is its own cluster. Every run has the same clusters in the same
// order. Recall targets are those that a repeated bigram predicts. The recall vectors are the part
// of nll and tokens on these targets; they may be empty in every run.
struct EndLosses {
  // nats, summed over targets
  std::vector<double> nll;
  std::vector<double> recall_nll;
  // number of targets
  std::vector<double> tokens;
  std::vector<double> recall_tokens;
  // Each target's loss capped at log V + 3; may be empty in a domain of every run
  std::vector<double> bounded_nll;
};
struct End {
  int64_t seed = 0;
  double held_out = 0;  // nats per token, mean over the training domains
  std::map<std::string, EndLosses> domains;
  std::map<std::string, EndLosses> held_out_domains;  // of `held_out`; may be empty in every run
  double training_loss = kUnknown;                    // mean over the last 5 % of the steps
};
struct Budget {
  double tokens = 0;
  std::vector<End> runs;     // trained through the complete schedule
  double epochs = kUnknown;  // training tokens over unique training tokens
};
struct Contender {
  std::string name;
  std::vector<Budget> budgets;
};

// Sample variances of runs' residuals along the reference's line, from one budget of a model.
// Measures: "all", "recall", "other", "bounded", "domain:NAME" (along the curve); these with the
// prefix "equal_tokens:", and "equal_tokens" for all targets (along the tangent);
// "recall_in_domain" and "recall_in_domain:NAME".
struct SeedVariance {
  std::string study;
  std::string model;
  double tokens = 0;
  int64_t seeds = 0;
  std::map<std::string, double> variance;  // nats squared, by measure
};

struct LadderOptions {
  double level = 0.95;
  double margin = 0.03;  // nats per token; differences within it count as equivalent
  // Nats by which the loss per recall target may fall more than that on other targets, from one
  // rung to the next: any value from 0.01 to 0.16 tells mature from immature rungs in the records.
  double maturity_fall = 0.1;
  double recall_lead = 0.2;     // nats by which recall targets must be easier than others
  double overfit_rise = 0.03;   // nats per token out of domain above the lowest rung before
  size_t draws = 16'384;        // at least, in the simulation that makes intervals simultaneous
  double recall_margin = 0.05;  // nats per recall target: spread of R over variants of attention
                                // in the records of the 34M studies is 0.02 to 0.04
  double epochs_ratio = 1.25;   // repetition costs 0.109 (± 0.011) nats per doubling of epochs in
                                // these records, so this factor is worth about the margin
  double memorising_gap = 0.1;  // nats of held-out over training loss: 0.03 at 2 epochs, 0.14 at 4
  double epochs_tolerance = 0.05;  // budgets whose epochs differ by this share are repeated equally
  double tokens_tolerance =
      0.01;  // share by which equal tokens may differ: budgets are whole steps
  std::vector<SeedVariance> variances;  // of other studies with the same size of model
  std::string study;                    // rows of this study's own models are not counted twice
};

struct BudgetResult {
  double tokens = 0;
  // means over the seeds
  double held_out = 0;
  double out_of_domain = 0;
  std::string problem;  // why there is no delta; empty otherwise
  std::string caveat;   // why a delta carries no verdict; empty otherwise
  bool early = false;   // of a problem or caveat: the held-out loss is too high for a comparison
  Interval delta{};     // of this budget alone
  int64_t seeds = 0;
  // the reference where it has this h
  double epochs = kUnknown;
  double reference_epochs = kUnknown;
  std::string no_equal_tokens;  // why E has no number; empty otherwise
  std::string no_recall;        // why R has none
  double slope = kUnknown;      // s_B
  // of this budget alone
  Interval equal_tokens = kNoEstimate;
  Interval recall = kNoEstimate;
};

// E or R of one architecture.
struct EqualTokens {
  std::string problem;  // why there is no number; empty when there is one
  Verdict verdict = Verdict::not_settled;
  std::string reason;                       // what would settle it; empty when it is settled
  Interval value = kNoEstimate;             // simultaneous over all contenders of the call
  Interval single = kNoEstimate;            // and all below: alone
  Interval over_domains = kNoEstimate;      // see EndResult
  std::map<std::string, Interval> domains;  // R: training domains
  // of E
  Interval recall_part = kNoEstimate;
  Interval other_part = kNoEstimate;
  double seed_error = 0;
  double reference_error = 0;
  double document_error = 0;
  double slope_error = 0;
  double seed_freedom = 0;
  int64_t runs = 0;
};

struct EndResult {
  std::string name;
  Verdict verdict = Verdict::not_settled;
  std::string judged_by;   // "delta_end", "equal_tokens", or empty
  std::string reason;      // what would settle the comparison; empty when it is settled
  std::string note;        // why a larger budget, or Δ_end, carries no verdict; or empty
  bool has_delta = false;  // false: no budget can be compared, and the numbers below are not set
  bool judged = false;     // delta carries a verdict; false with a caveat about its budget
  std::string not_judged;  // why it carries none; empty otherwise
  double tokens = 0;       // the budget of delta: the largest of the least repeated ones without a
                           // problem or a caveat, or else the largest without a problem
  Interval delta{};        // simultaneous over all contenders of the call
  Interval delta_single{};
  std::map<std::string, Interval> domains;  // each alone: exploratory
  // of delta, on recall targets and on the others
  Interval recall_part{};
  Interval other_part{};
  Interval over_domains = kNoEstimate;  // of delta, with the domains as a sample; NaN if one
  Interval bounded = kNoEstimate;       // delta of the bounded loss, alone; NaN if none
  bool has_trend = false;
  Interval trend{};  // change of Delta_end per doubling of tokens
  double held_out = 0;
  double final_loss = 0;
  double reference_loss = 0;  // of the reference at the same tokens, between
                              // rungs interpolated; NaN outside the ladder
  // standard errors of delta
  double seed_error = 0;
  double reference_error = 0;
  double document_error = 0;
  double seed_freedom = 0;
  // at the budget of delta
  double epochs = kUnknown;
  double reference_epochs = kUnknown;
  // E and R
  EqualTokens equal_tokens;
  EqualTokens recall;
  std::string agreement;  // how Delta_end and E disagree; empty otherwise
  std::vector<BudgetResult> budgets;
};

struct LadderResult {
  std::string problem;  // why nothing can be compared; empty otherwise
  std::vector<std::string> warnings;
  std::vector<EndResult> results;
  double critical = 1;  // half-width of `delta` over half-width of `delta_single`
  // The reference recalls, and this is settled at the last rung; or there are no recall targets.
  bool mature = false;
  std::vector<double> recall;  // by rung: mean over domains of the loss per recall target
};

// Throws BadInput when domains or clusters differ between runs, or an option is out of range.
LadderResult compare_ends(const std::vector<Budget>& ladder,
                          const std::vector<Contender>& contenders,
                          const LadderOptions& options = {});

// The rows that these contenders give to a table: one for each budget with two or more seeds at
// which the contender can be compared. Empty if nothing can be compared.
std::vector<SeedVariance> seed_variances(const std::vector<Budget>& ladder,
                                         const std::vector<Contender>& contenders,
                                         const LadderOptions& options = {});

}  // namespace assay::stats
