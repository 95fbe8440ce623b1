#pragma once
// Degradation of base capability at the end of training, against a ladder of references.  [BC 2]
//   Delta_end(a) = o(a) - f(h(a))
// h: held-out loss on the training domains, o: loss out of domain, both at the end of a run that
// was trained through its complete schedule. f(h): out-of-domain loss that the reference ends with
// when it ends with held-out loss h. The reference is trained at several budgets with several
// seeds; f is read between these rungs (interpolation.h) and never extrapolated.
// Intervals count the seeds of both sides, with separate variances, and the documents, which are
// the same in every run and come in clusters of one source. The interval `delta` holds for all
// contenders of one call together. Derivation and simulated coverage: docs/statistics.md.
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "stats/uncertainty.h"

namespace assay::stats {

enum class Verdict { degraded, better, equivalent, not_settled };

// Losses of one domain at the end of a run, by cluster. A cluster is the source of a document;
// without sources each document is its own cluster. Every run has the same clusters in the same
// order. Recall targets are those that a repeated bigram predicts. The recall vectors are the part
// of nll and tokens on these targets; they may be empty in every run.
struct EndLosses {
  std::vector<double> nll, recall_nll;        // nats, summed over targets
  std::vector<double> tokens, recall_tokens;  // number of targets
};
struct End {
  int64_t seed = 0;
  double held_out = 0;  // nats per token, mean over the training domains
  std::map<std::string, EndLosses> domains;
};
struct Budget {
  double tokens = 0;
  std::vector<End> runs;  // trained through the complete schedule
};
struct Contender {
  std::string name;
  std::vector<Budget> budgets;
};

struct LadderOptions {
  double level = 0.95;
  double margin = 0.03;        // nats per token; differences within it count as equivalent
  double maturity_fall = 0.1;  // nats per recall target from one rung to the next
  double recall_lead = 0.2;    // nats by which recall targets must be easier than others
  double overfit_rise = 0.03;  // nats per token out of domain above the lowest rung before
  size_t draws = 65'536;       // of the simulation that makes intervals simultaneous
};

struct BudgetResult {
  double tokens = 0;
  double held_out = 0, out_of_domain = 0;  // means over the seeds
  std::string problem;                     // why there is no delta; empty otherwise
  std::string caveat;                      // why a delta carries no verdict; empty otherwise
  bool early = false;  // of a problem or caveat: the held-out loss is too high for a comparison
  Interval delta{};    // of this budget alone
  int64_t seeds = 0;
};

struct EndResult {
  std::string name;
  Verdict verdict = Verdict::not_settled;
  std::string reason;      // what would settle the comparison; empty when it is settled
  std::string note;        // why a larger budget than that of the verdict carries none; or empty
  bool has_delta = false;  // false: no budget can be compared, and the numbers below are not set
  bool judged = false;     // delta carries a verdict; false with a caveat about its budget
  double tokens = 0;       // the budget that the verdict is about: the largest without a problem or
                           // a caveat, or else the largest without a problem
  Interval delta{};        // simultaneous over all contenders of the call
  Interval delta_single{};
  std::map<std::string, Interval> domains;  // each alone: exploratory
  Interval recall_part{}, other_part{};     // of delta, on recall targets and on the others
  bool has_trend = false;
  Interval trend{};  // change of Delta_end per doubling of tokens
  double held_out = 0, final_loss = 0;
  double reference_loss = 0;  // of the reference at the same tokens, between
                              // rungs interpolated; NaN outside the ladder
  double seed_error = 0, reference_error = 0, document_error = 0;  // standard errors of delta
  double seed_freedom = 0;
  std::vector<BudgetResult> budgets;
};

struct LadderResult {
  std::string problem;  // why nothing can be compared; empty otherwise
  std::vector<std::string> warnings;
  std::vector<EndResult> results;
  double critical = 1;         // half-width of `delta` over half-width of `delta_single`
  bool mature = false;         // the reference recalls, and this is settled at the last rung
  std::vector<double> recall;  // by rung: mean over domains of the loss per recall target
};

// Throws BadInput when domains or clusters differ between runs, or an option is out of range.
LadderResult compare_ends(const std::vector<Budget>& ladder,
                          const std::vector<Contender>& contenders,
                          const LadderOptions& options = {});

}  // namespace assay::stats
