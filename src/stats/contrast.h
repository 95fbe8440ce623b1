#pragma once
// Differences between ends of runs, with the variance of each from seeds and from documents.
//
// A group is the set of seeds of one model at one budget: a rung of the reference's ladder, or one
// budget of a contender. Every quantity is a contrast of the groups' means (o: out-of-domain loss,
// h: held-out loss), linearised in h:
//   estimate  = sum_g on_loss[g] mean_r(o_gr)
//   seeds     = sum_g var_r(z_gr) / n_g,   z_gr = on_loss[g] o_gr + on_held_out[g] h_gr
//   documents = variance of a ratio over clusters, y_c = sum_g on_loss[g] mean_r(nll_grc)
// z contains only the residual along the local slope of the reference's curve, because a run that
// ends at a lower held-out loss also ends at a lower out-of-domain loss.
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "stats/interpolation.h"
#include "stats/ladder.h"
#include "stats/simultaneous.h"

namespace assay::stats {

enum class Targets { all, recall, other };

// Which loss: of one domain or the mean over all of them (-1), on which targets. Losses on a part
// of the targets are divided by all tokens, so that both parts add up.
struct Measure {
  int domain = -1;
  Targets targets = Targets::all;
};

struct Contrast {
  std::vector<double> on_loss, on_held_out;  // by group
};
// sum_j weights[j] contrasts[j]
Contrast combine(const std::vector<Contrast>& contrasts, const std::vector<double>& weights);

struct Estimate {
  double value = 0;
  Member noise;                 // by source; see simultaneous.h
  std::vector<double> freedom;  // of every estimator in `noise`
  double contender_error = 0;   // standard errors
  double reference_error = 0;
  std::vector<std::vector<double>> influence;  // [domain][cluster], of the document noise

  Variance seeds() const { return seed_variance(noise, freedom); }
};

class Ends {
 public:
  // `rungs` in order of tokens, with strictly falling mean held-out losses and at least two runs of
  // one rung. Throws BadInput, naming the run, when domains or clusters are not those of the first.
  explicit Ends(const std::vector<Budget>& rungs);
  size_t add(const Budget& budget, const std::string& name);  // returns the group

  size_t rungs() const { return rungs_; }
  size_t seeds(size_t group) const { return groups_[group].runs.size(); }
  const std::vector<std::string>& domains() const { return names_; }
  size_t clusters(size_t domain) const;  // those with tokens
  const RungCurve& curve() const { return *curve_; }

  double held_out(size_t group) const { return groups_[group].held_out; }
  double loss(size_t group, Measure measure = {}) const;
  double reference_loss(double held_out) const;  // f(h), mean over the domains
  // Mean over the domains of the loss per recall target; NaN when there are none.
  double recall_loss(size_t group) const;
  // Nats by which recall targets are easier than the others; NaN when there are none of either.
  double recall_lead(size_t group) const;

  // The difference of a contender's group to the reference's curve at its mean held-out loss.
  Contrast difference(size_t group, Measure measure) const;
  Estimate estimate(const Contrast& contrast, Measure measure) const;

  // Degrees of freedom of the contenders' pooled variance between seeds. Below 3 the reference's
  // residuals join the pool.
  double contender_freedom() const;
  size_t contender_groups() const { return groups_.size() - rungs_; }
  bool reference_joins() const { return contender_freedom() < 3; }
  // Of one contender run's residual, pooled over all groups of contenders.
  Variance contender_variance(Measure measure) const;

 private:
  // Mean over the domains that have such targets, recall or other; NaN when none has.
  double loss_per_target(size_t group, Targets targets) const;

  struct Domain {
    std::array<double, 3> loss{};              // by Targets, nats per token of the domain
    std::array<std::vector<double>, 3> nll{};  // by Targets and cluster
  };
  struct Run {
    double held_out = 0;
    std::vector<Domain> domains;
  };
  struct Group {
    std::vector<Run> runs;
    double held_out = 0;
    std::vector<Domain> mean;
    // By domain and Targets: sum over the runs of the document variance of their deviations.
    std::vector<std::array<double, 3>> luck;
  };

  Run read(const End& end, const std::string& name) const;
  Group read(const Budget& budget, const std::string& name) const;
  static double loss(const std::vector<Domain>& domains, Measure measure);
  std::vector<double> rung_losses(Measure measure) const;
  double slope_at(double held_out, Measure measure) const;
  Variance residual_variance(size_t first, size_t last, Measure measure) const;
  Variance rung_variance(size_t rung, const Contrast& contrast, Measure measure) const;
  double luck(size_t first, size_t last, size_t domain, Targets targets) const;
  Variance documents(const Contrast& contrast, Measure measure,
                     std::vector<std::vector<double>>& influence) const;

  std::vector<std::string> names_;
  std::vector<std::vector<double>> tokens_, recall_tokens_;  // by domain and cluster
  std::vector<Group> groups_;                                // the rungs first
  size_t rungs_ = 0;
  std::optional<RungCurve> curve_;
};

}  // namespace assay::stats
