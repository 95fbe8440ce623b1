#pragma once
// Differences between ends of runs, with the variance of each from seeds and from documents.
//
// A group is the set of seeds of one model at one budget: a rung of the reference's ladder, or one
// budget of a contender. Every quantity is a contrast of the groups' means (o: an outcome such as
// the out-of-domain loss, h: held-out loss), linearised in h:
//   estimate  = sum_g on_loss[g] mean_r(o_gr)
//   seeds     = sum_g var_r(z_gr) / n_g,   z_gr = on_loss[g] o_gr + on_held_out[g] h_gr
//   documents = sum of squares over clusters of u_c,
//     unseen text:   u_c = influence of y_c = sum_g on_loss[g] mean_r(nll_grc) on its ratio
//     held-out text: u_c = the same for y_c = sum_g on_held_out[g] mean_r(nll_grc), plus that of
//                    the outcome if the outcome is measured on this text
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

// `bounded` is all targets with each loss capped.
enum class Targets { all, recall, other, bounded };
// test: the unseen domains; held_out: held-out text of the training domains.
enum class Text { test, held_out };

// Which loss: of one domain or the mean over all of them (-1), on which targets. On unseen text,
// losses on a part of the targets are divided by all tokens, so that both parts add up. On held-out
// text, losses on recall targets are divided by the recall targets.
struct Measure {
  int domain = -1;
  Targets targets = Targets::all;
  Text text = Text::test;
};

// The line of the reference along which residuals are taken: the curve of Delta_end, the tangent of
// E, or that of R.
enum class Line { curve, tangent, recall_tangent };
// The reference's local line at the rung with a contender's tokens.
struct Tangent {
  size_t rung = 0;
  // the segments next to the rung that give the slope
  bool before = false;
  bool after = false;
  std::vector<size_t> others;  // segments whose slopes show how much the slope changes
};

// The rows of a table that are not about this study's own contenders.
std::vector<SeedVariance> rows_of_others(const LadderOptions& options,
                                         const std::vector<Contender>& contenders);

struct Contrast {
  // by group
  std::vector<double> on_loss;
  std::vector<double> on_held_out;
  double slope_error = 0;  // signed: standard deviation of the slope's model error, times h_a - H_B
};
// sum_j weights[j] contrasts[j]
Contrast combine(const std::vector<Contrast>& contrasts, const std::vector<double>& weights);

struct Estimate {
  double value = 0;
  Member noise;                 // by source; see simultaneous.h
  std::vector<double> freedom;  // of every estimator in `noise`
  double contender_error = 0;   // standard errors
  double reference_error = 0;
  double slope_error = 0;
  bool known = true;        // false: no variance between the seeds of contenders could be estimated
  Variance axis_documents;  // the part of noise.documents from held-out text
  std::vector<std::vector<double>> influence;  // [domain][cluster], of the document noise

  Variance seeds() const { return seed_variance(noise, freedom); }
};

class Ends {
 public:
  // `rungs` in order of tokens, with strictly falling mean held-out losses and at least two runs of
  // one rung. Throws BadInput, naming the run, when domains or clusters are not those of the first.
  explicit Ends(const std::vector<Budget>& rungs);
  size_t add(const Budget& budget, const std::string& name);  // returns the group
  // Groups of contenders that share one variance between seeds: along the curve the usable ones
  // (all of them while no usable one has two seeds), along tangents those with this tangent.
  void set_usable(size_t group) { groups_[group].usable = true; }
  void set_tangent(size_t group, Line line, Tangent tangent) {
    groups_[group].tangent[size_t(line)] = std::move(tangent);
  }
  // Variances from other studies, which join those of the contenders.
  void set_table(std::vector<SeedVariance> rows) { table_ = std::move(rows); }

  size_t rungs() const { return rungs_; }
  size_t seeds(size_t group) const { return groups_[group].runs.size(); }
  const std::vector<std::string>& domains(Text text = Text::test) const;
  size_t clusters(Text text, size_t domain) const;  // those with tokens
  bool has_recall(Text text) const;
  bool has_bounded() const { return bounded_; }
  const RungCurve& curve() const { return *curve_; }

  double held_out(size_t group) const { return groups_[group].held_out; }
  double loss(size_t group, Measure measure = {}) const;
  double reference_loss(double held_out) const;  // f(h), mean over the domains
  // Mean over the domains of the loss per recall target; NaN when there are none.
  double recall_loss(size_t group) const;
  // Nats by which recall targets are easier than the others; NaN when there are none of either.
  double recall_lead(size_t group) const;
  // Slope of the reference's line that belongs to a contender's group.
  double slope(size_t group, Measure measure, Line line) const;

  // The difference of a contender's group to the reference's curve at its mean held-out loss.
  Contrast difference(size_t group, Measure measure) const;
  // The difference to the tangent at the rung B with the same tokens:
  //   (o_a - O_B) - s (h_a - H_B),  s = sum_k w_k(H) O_k
  // Model error of s: half the largest difference to the slope of a segment in tangent.others, or
  // half of s if there is none.
  Contrast equal_tokens(size_t group, Measure measure, Line line) const;
  Estimate estimate(const Contrast& contrast, Measure measure, Line line = Line::curve) const;

  // Variance of one run's residual, pooled over the contenders' groups and the table.
  Variance contender_variance(Measure measure, Line line) const;
  // Variance of the residuals of the runs of one group.
  Variance group_variance(size_t group, Measure measure, Line line) const;
  // Does a contender's group carry a number along this line?
  bool usable(size_t group, Line line) const {
    return line == Line::curve ? groups_[group].usable
                               : groups_[group].tangent[size_t(line)].has_value();
  }
  // The measure's name in a table of variances.
  std::string key(Measure measure, Line line) const;

 private:
  // Mean over the domains that have such targets, recall or other; NaN when none has.
  double loss_per_target(size_t group, Targets targets) const;

  struct Texts {
    std::vector<std::string> names;
    // by domain and cluster
    std::vector<std::vector<double>> tokens;
    std::vector<std::vector<double>> recall_tokens;
  };
  struct Domain {
    std::array<double, 4> loss{};              // by Targets; see Measure
    std::array<std::vector<double>, 4> nll{};  // by Targets and cluster
  };
  using Domains = std::array<std::vector<Domain>, 2>;  // by Text
  struct Run {
    double held_out = 0;
    Domains domains;
  };
  // Sums over the runs of products of their deviations' influences over documents: of the targets
  // with themselves, and with all targets of the text.
  struct Luck {
    double own = 0;
    double with_all = 0;
  };
  struct Group {
    std::vector<Run> runs;
    double held_out = 0;
    Domains mean;
    std::array<std::vector<std::array<Luck, 4>>, 2> luck;  // by Text, domain and Targets
    std::vector<double> curve_slope;                       // weights of the rungs
    bool usable = false;
    std::array<std::optional<Tangent>, 3> tangent;  // by Line
  };
  // Weights of a domain's outcome and of its part of the held-out loss in a contrast.
  struct Share {
    double outcome = 0;
    double axis = 0;
  };

  Texts read(const std::map<std::string, EndLosses>& domains) const;
  Run read(const End& end, const std::string& name) const;
  std::vector<Domain> read(const End& end, Text text, const std::string& name) const;
  Group read(const Budget& budget, const std::string& name) const;
  void add_luck(Group& group) const;
  const std::vector<double>& targets_of(Text text, size_t domain, Targets targets) const;
  double loss(const Domains& domains, Measure measure) const;
  std::vector<double> rung_losses(Measure measure) const;
  std::vector<size_t> pool(Line line) const;
  // Noise of the runs of a group along the line.
  std::vector<double> residuals(size_t group, Measure measure, Line line) const;
  Variance held_out_variance(Line line) const;
  Variance rung_variance(size_t rung, const Contrast& contrast, Measure measure) const;
  void add_rungs(const Contrast& contrast, Measure measure, Estimate& estimate) const;
  void add_contenders(const Contrast& contrast, Measure measure, Line line,
                      Estimate& estimate) const;
  Share share_of(Measure measure, Text text, size_t domain) const;
  double luck(size_t group, Line line, Text text, size_t domain, Targets targets,
              Share weight) const;
  void add_documents(const Contrast& contrast, Measure measure, Line line,
                     Estimate& estimate) const;

  std::array<Texts, 2> texts_;
  bool bounded_ = false;
  std::vector<Group> groups_;  // the rungs first
  std::vector<SeedVariance> table_;
  size_t rungs_ = 0;
  std::optional<RungCurve> curve_;
};

}  // namespace assay::stats
