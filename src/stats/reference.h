#pragma once
// The ladder of the reference: what it ends with, at which held-out losses a contender can be
// compared with it, and why not at the others (docs/statistics.md). Losses are in nats per token.
#include <optional>
#include <string>
#include <vector>

#include "stats/contrast.h"
#include "stats/ladder.h"

namespace assay::stats {

// f(h), mean over the domains, in nats per token. NaN outside the range of the reference's runs, or
// without a ladder.
double ladder_loss(const std::vector<Budget>& ladder, double held_out);
// Tokens after which the reference ends with this held-out loss: where the curve through the rungs'
// held-out losses over log tokens (interpolation.h) has it. NaN outside the means of the rungs.
double ladder_tokens(const std::vector<Budget>& ladder, double held_out);

// "82M tokens"
std::string millions(double tokens);
std::vector<Budget> in_order(std::vector<Budget> budgets);  // of their tokens
// The reason why the runs are unusable, or "". `name` is their name in sentences: "the reference".
std::string problem_of(const std::vector<Budget>& budgets, const std::string& name);
// The reason why a ladder in order is unusable. It also needs two rungs, seeds and falling losses.
std::string problem_of(const std::vector<Budget>& ladder);

class Reference {
 public:
  // A ladder in order without a problem, and its ends. Keeps references to all three.
  Reference(const std::vector<Budget>& ladder, const Ends& ends, const LadderOptions& options);

  // By rung: mean over domains of the loss per recall target.
  const std::vector<double>& recall() const { return recall_; }
  bool mature() const;  // it recalls, and this is settled at the last rung
  std::vector<std::string> warnings() const;
  double seeds_per_rung() const;
  // Out of domain, after these tokens, by the curve over log tokens. NaN outside of the ladder.
  double loss_after(double tokens) const;

  // Is the held-out loss among those that the reference's runs end with?
  bool covers(double held_out) const { return low_ <= held_out && held_out <= high_; }
  bool is_above(double held_out) const { return held_out > high_; }
  // Why a held-out loss that is not covered cannot be compared, and what to do.
  std::string outside(double held_out) const;
  // Why one that is covered carries no verdict; empty when it carries one.
  std::string immaturity(double held_out) const;
  std::string overfitting(double held_out) const;
  // Why a budget of a contender carries no verdict; "" if it has one or the epochs are unknown.
  std::string repetition(const Budget& contender) const;
  // Epochs of the reference where it ends with this held-out loss, interpolated in log tokens.
  double epochs_at(double held_out) const;

  // The rung with these tokens, if there is one.
  std::optional<size_t> rung_at(double tokens) const;
  // The reference's line at a rung, from the segments next to it that have no problem. Repetition
  // is no problem of the recall loss in domain, which changes by 0.008 (± 0.008) per doubling.
  std::optional<Tangent> tangent(size_t rung, Line line) const;
  // Why a rung has no tangent.
  std::string no_tangent(size_t rung, Line line) const;
  // Why equal tokens at a rung are not equal training; empty when they are or epochs are unknown.
  std::string unequal_epochs(size_t rung, double epochs) const;
  // Why a held-out loss after the tokens of a rung is implausible: it is further outside the ladder
  // than the ladder is wide. The slope at a rung says nothing there. Empty when it is not.
  std::string implausible(size_t rung, double held_out) const;

 private:
  // Rise of the loss out of domain from its lowest value at an earlier rung to rung b. It counts
  // all rungs between, so additional rungs do not hide it.
  struct Rise {
    double nats = 0;
    size_t from = 0;
  };
  Rise rise_until(size_t b) const;
  // Why the slope between rungs b and b + 1 is not that of a mature reference on text that is read
  // once; empty when it is.
  std::string immature_segment(size_t b) const;
  std::string repeated_segment(size_t b, Line line) const;
  bool differ(double epochs, double others) const;     // by more than options.epochs_ratio
  std::string memorising(const Budget& budget) const;  // empty if the model does not
  void warn_of_texts(std::vector<std::string>& out) const;
  double highest_at(size_t b) const;
  double recall_fall(size_t b) const;
  double tokens_to_reach(double held_out) const;
  std::string tokens_of(size_t b) const { return millions(ladder_[b].tokens); }

  const std::vector<Budget>& ladder_;
  const Ends& ends_;
  const LadderOptions& options_;
  std::vector<double> recall_;
  // of the held-out losses of all runs
  double low_;
  double high_;
};

}  // namespace assay::stats
