#include "stats/ladder.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "base/error.h"
#include "stats/contrast.h"
#include "stats/student.h"

namespace assay::stats {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr size_t kFewClusters = 5;
constexpr double kMostSeeds = 64;

// With the minus sign of the tables.
std::string signed_nats(double value) {
  return fmt::format("{}{:.3f}", value < 0 ? "−" : "+", std::abs(value));
}

std::string millions(double tokens) {
  if (tokens < 1e6) return fmt::format("{:.0f} tokens", tokens);
  if (tokens < 1e9) return fmt::format("{:.4g}M tokens", tokens / 1e6);
  return fmt::format("{:.4g}B tokens", tokens / 1e9);
}

std::vector<Budget> in_order(std::vector<Budget> budgets) {
  std::ranges::sort(budgets, {}, &Budget::tokens);
  return budgets;
}

// What makes a run unusable; empty when nothing does.
std::string problem_of(const End& end) {
  if (!std::isfinite(end.held_out)) return fmt::format("a held-out loss of {}", end.held_out);
  for (const auto& [domain, losses] : end.domains)
    for (const auto* values : {&losses.nll, &losses.recall_nll})
      for (const double nll : *values)
        if (!std::isfinite(nll)) return fmt::format("a loss of {} on domain '{}'", nll, domain);
  return "";
}

std::string problem_of(const std::vector<Budget>& budgets, const std::string& name) {
  for (size_t b = 0; b < budgets.size(); ++b) {
    const std::string at = millions(budgets[b].tokens);
    if (!(budgets[b].tokens > 0)) return fmt::format("A budget of {} is not above zero.", name);
    if (b > 0 && budgets[b].tokens == budgets[b - 1].tokens)
      return fmt::format("{} has the budget of {} twice; put its runs together.", name, at);
    if (budgets[b].runs.empty())
      return fmt::format("{} has no finished run at {}; train one.", name, at);
    for (const End& end : budgets[b].runs)
      if (const auto what = problem_of(end); !what.empty())
        return fmt::format("Seed {} of {} at {} ends with {}; train it again or leave it out.",
                           end.seed, name, at, what);
  }
  return "";
}

double mean_held_out(const Budget& budget) {
  double sum = 0;
  for (const End& end : budget.runs) sum += end.held_out;
  return sum / double(budget.runs.size());
}

std::string problem_of(const std::vector<Budget>& ladder) {
  if (ladder.size() < 2)
    return fmt::format("The reference has {} rung; train it to the end at two or more budgets.",
                       ladder.size());
  if (const auto problem = problem_of(ladder, "the reference"); !problem.empty()) return problem;
  if (std::ranges::none_of(ladder, [](const Budget& rung) { return rung.runs.size() > 1; }))
    return "No rung of the reference has two seeds, so the error is unknown; "
           "train two or more seeds at every budget.";
  for (size_t b = 0; b + 1 < ladder.size(); ++b)
    if (!(mean_held_out(ladder[b + 1]) < mean_held_out(ladder[b])))
      return fmt::format(
          "The reference's held-out loss does not fall from {} ({:.3f}) to {} ({:.3f}); "
          "remove one of the two rungs or train more seeds.",
          millions(ladder[b].tokens), mean_held_out(ladder[b]), millions(ladder[b + 1].tokens),
          mean_held_out(ladder[b + 1]));
  const auto& domains = ladder[0].runs[0].domains;
  if (domains.empty()) return "The runs have no losses out of domain; evaluate them on one domain.";
  for (const auto& [name, losses] : domains)
    if (std::ranges::none_of(losses.tokens, [](double t) { return t > 0; }))
      return fmt::format("The domain '{}' has no tokens to predict; give it longer documents.",
                         name);
  return "";
}

struct Span {
  double low, high;
  bool holds(double x) const { return low <= x && x <= high; }
};

// The highest held-out loss that is still at rung b: a twentieth of the way to the rung before. A
// rule by the spread of the rung's runs would be wider for a reference that varies more.
double highest_at(const std::vector<Budget>& ladder, size_t b) {
  const double own = mean_held_out(ladder[b]);
  return b == 0 ? kNaN : own + 0.05 * (mean_held_out(ladder[b - 1]) - own);
}

Span held_out_span(const Budget& rung) {
  const auto [low, high] = std::ranges::minmax_element(rung.runs, {}, &End::held_out);
  return {low->held_out, high->held_out};
}

// The held-out losses that the reference's runs reach.
Span held_out_span(const std::vector<Budget>& ladder) {
  Span all = held_out_span(ladder[0]);
  for (const Budget& rung : ladder) {
    const Span one = held_out_span(rung);
    all = {std::min(all.low, one.low), std::max(all.high, one.high)};
  }
  return all;
}

// Tokens at which the reference would reach a held-out loss below the ladder, rounded up to
// doublings of the last rung. A line in log tokens through the last two rungs: optimistic.
double tokens_to_reach(const std::vector<Budget>& ladder, double held_out) {
  const Budget& top = ladder.back();
  const Budget& before = ladder[ladder.size() - 2];
  const double doublings = std::log2(top.tokens / before.tokens);
  const double fall = (mean_held_out(before) - mean_held_out(top)) / doublings;
  const double missing = (mean_held_out(top) - held_out) / fall;
  return top.tokens * std::exp2(std::clamp(std::ceil(missing - 1e-6), 1.0, 20.0));
}

// A loss of the reference's rungs over their log tokens, by the curve of interpolation.h.
class LossOverTokens {
 public:
  LossOverTokens(const std::vector<Budget>& ladder, std::vector<double> losses)
      : losses_(std::move(losses)), curve_(places(ladder), losses_) {}
  double operator()(double log_tokens) const { return curve_.at(-log_tokens, losses_); }

 private:
  // A curve is read over what falls from rung to rung
  static std::vector<double> places(const std::vector<Budget>& ladder) {
    std::vector<double> places;
    for (const Budget& rung : ladder) places.push_back(-std::log(rung.tokens));
    return places;
  }
  std::vector<double> losses_;
  RungCurve curve_;
};

// NaN outside of the ladder.
double reference_loss_at(const std::vector<Budget>& ladder, const Ends& ends, double tokens) {
  if (tokens < ladder.front().tokens || tokens > ladder.back().tokens) return kNaN;
  std::vector<double> losses;
  for (size_t b = 0; b < ladder.size(); ++b) losses.push_back(ends.loss(b));
  return LossOverTokens(ladder, losses)(std::log(tokens));
}

// Fall of the loss on recall targets from rung b to the next one, per doubling of the tokens where
// the rungs are closer than that: additional rungs do not make a reference mature.
double recall_fall(const std::vector<Budget>& ladder, const std::vector<double>& recall, size_t b) {
  const double doublings = std::log2(ladder[b + 1].tokens / ladder[b].tokens);
  return (recall[b] - recall[b + 1]) / std::min(1.0, doublings);
}

// What the maturity gate says about held-out loss h; empty when the reference is mature there.
std::string immaturity(const std::vector<Budget>& ladder, const std::vector<double>& recall,
                       const Ends& ends, double held_out, const LadderOptions& options) {
  const double limit = options.maturity_fall;
  size_t segment = ends.curve().segment(held_out);
  const size_t last = ladder.size() - 2;
  // Before it learns to recall, its loss on recall targets need not fall either.
  if (const double lead = ends.recall_lead(segment + 1); lead < options.recall_lead)
    return fmt::format(
        "The reference does not recall yet at this held-out loss ({:.3f}): after {}, "
        "recall targets are easier for it than others by {:.2f} nats; {:.2f} are needed. "
        "Train the reference and the contender longer.",
        held_out, millions(ladder[segment + 1].tokens), lead, options.recall_lead);
  // At a rung the question is whether the reference still learns to recall after it.
  if (segment < last && held_out <= highest_at(ladder, segment + 1)) ++segment;
  const auto fall = [&](size_t b) { return recall_fall(ladder, recall, b); };
  if (!(fall(segment) > limit)) return "";
  // Budgets are whole steps, so doublings are not exact
  const bool closer = ladder[segment + 1].tokens < 1.99 * ladder[segment].tokens;
  std::string reason = fmt::format(
      "The reference still learns to recall at this held-out loss ({:.3f}): "
      "its loss on recall targets falls by {:.2f} nats{} from {} to {}, and the limit is {:.2f}.",
      held_out, fall(segment), closer ? " per doubling of the tokens" : "",
      millions(ladder[segment].tokens), millions(ladder[segment + 1].tokens), limit);
  for (size_t b = segment + 1; b <= last; ++b)
    if (!(fall(b) > limit))
      return reason + fmt::format(
                          " The reference is mature from {} on; "
                          "train the contender until its held-out loss is {:.3f} or less.",
                          millions(ladder[b].tokens), highest_at(ladder, b));
  const double before = last > 0 ? fall(last - 1) : 2 * fall(last);
  const double shrink = std::clamp(fall(last) / std::max(before, 1e-9), 0.3, 0.9);
  const double doublings = std::ceil(std::log(limit / fall(last)) / std::log(shrink));
  const double tokens = ladder.back().tokens * std::exp2(std::clamp(doublings, 1.0, 20.0));
  return reason +
         fmt::format(" Train the reference and the contender to about {}.", millions(tokens));
}

// Rise of the loss out of domain from its lowest value at an earlier rung to rung b. It counts all
// rungs between, so additional rungs do not hide it.
struct Rise {
  double nats = 0;
  size_t from = 0;
};
Rise rise_until(const Ends& ends, size_t b) {
  size_t lowest = 0;
  for (size_t earlier = 1; earlier <= b; ++earlier)
    if (ends.loss(earlier) < ends.loss(lowest)) lowest = earlier;
  return {ends.loss(b) - ends.loss(lowest), lowest};
}

// Why held-out loss h carries no verdict although the reference has learned to recall: its loss out
// of domain has risen there while its held-out loss fell. Empty when it has not. A third of the
// limit is allowed at h itself, because a contender seldom ends exactly at a rung.
std::string overfitting(const std::vector<Budget>& ladder, const Ends& ends, double held_out,
                        double limit) {
  const size_t until = ends.curve().segment(held_out) + 1;
  const Rise rise = rise_until(ends, until);
  const double here = ends.reference_loss(held_out) - ends.loss(rise.from);
  if (!(rise.nats > limit) || !(here > limit / 3)) return "";
  return fmt::format(
      "The reference overfits the training domains at this held-out loss ({:.3f}): "
      "its loss out of domain rises by {:.3f} nats from {} to {}. Compare at a smaller budget, "
      "which ends with a held-out loss of {:.3f} or more, or train on more text.",
      held_out, rise.nats, millions(ladder[rise.from].tokens), millions(ladder[until].tokens),
      mean_held_out(ladder[rise.from]));
}

Interval interval_of(const Estimate& e, double level, double factor = 1) {
  Interval x = interval(e.value, e.seeds(), e.noise.documents, level);
  x.low = e.value - factor * (e.value - x.low);
  x.high = e.value + factor * (x.high - e.value);
  return x;
}

Verdict verdict_of(const Interval& delta, double margin) {
  if (delta.low >= -margin && delta.high <= margin) return Verdict::equivalent;
  if (delta.low > 0) return Verdict::degraded;
  if (delta.high < 0) return Verdict::better;
  return Verdict::not_settled;
}

// The half-width of `delta` if contenders had `own` times and the reference `other` times as many
// seeds. Degrees of freedom grow in proportion.
double half_width_with(const Estimate& e, double own, double other, const LadderOptions& options,
                       double factor) {
  const Variance seeds = e.seeds();
  const double more = std::min(own, other) == 1 ? std::sqrt(own * other) : std::min(own, other);
  const Variance planned{
      e.contender_error * e.contender_error / own + e.reference_error * e.reference_error / other,
      seeds.freedom * more};
  return factor * interval(0, planned, e.noise.documents, options.level).high;
}

std::string what_settles(const Estimate& e, int64_t seeds, double seeds_of_rung,
                         const LadderOptions& options, double factor) {
  const double wanted = std::max(std::abs(e.value), options.margin - std::abs(e.value));
  const std::string open = fmt::format(
      "The interval reaches across zero and beyond the margin of {:.3g} nats.", options.margin);
  const double of_documents = factor * interval(0, {0, 1}, e.noise.documents, options.level).high;
  if (of_documents >= wanted)
    return open + fmt::format(
                      " The documents alone leave an error of {:.3f} nats, "
                      "so more seeds cannot settle it; evaluate on documents from more sources.",
                      of_documents);
  // The cheapest numbers: those of this model, and those of every rung as a multiple of today's.
  const double rungs =
      double(std::ranges::count_if(e.noise.seeds,
                                   [](const Noise& noise) { return noise.amplitude != 0; }) -
             1);
  double fewest = std::numeric_limits<double>::infinity(), own = 0, other = 1;
  for (double more = 1; more * seeds_of_rung <= kMostSeeds; ++more)
    for (double wide = double(seeds); wide <= kMostSeeds; ++wide) {
      const double runs = wide + more * rungs * seeds_of_rung;
      if (runs >= fewest || (wide == double(seeds) && more == 1)) continue;
      if (!(half_width_with(e, wide / double(seeds), more, options, factor) < wanted)) continue;
      fewest = runs;
      own = wide;
      other = more;
    }
  if (own > 0 && other == 1)
    return fmt::format(
        "{} About {:.0f} seeds of this model would settle it if the difference stays at {}.", open,
        own, signed_nats(e.value));
  if (own > 0)
    return fmt::format(
        "{} About {:.0f} seeds of this model and {:.0f} times as many of the reference as now, "
        "at every rung, would settle it if the difference stays at {}.",
        open, own, other, signed_nats(e.value));
  return open + fmt::format(" No practical number of seeds settles a difference of {}.",
                            signed_nats(e.value));
}

double seeds_per_rung(const std::vector<Budget>& ladder) {
  size_t runs = 0;
  for (const Budget& rung : ladder) runs += rung.runs.size();
  return double(runs) / double(ladder.size());
}

bool is_copy(const End& a, const End& b) {
  const auto losses = [](const End& end) {
    std::vector<std::vector<double>> all = {{end.held_out}};
    for (const auto& [domain, one] : end.domains) all.push_back(one.nll);
    return all;
  };
  return losses(a) == losses(b);
}

// Copies of one run are no evidence about the spread of seeds.
void warn_of_copies(const std::vector<Budget>& budgets, const std::string& name,
                    LadderResult& result) {
  for (const Budget& budget : budgets)
    for (size_t b = 1; b < budget.runs.size(); ++b)
      for (size_t a = 0; a < b; ++a)
        if (is_copy(budget.runs[a], budget.runs[b])) {
          result.warnings.push_back(fmt::format(
              "Seeds {} and {} of {} at {} have exactly the same losses. "
              "If they are copies of one run, all intervals are too narrow; remove one of them.",
              budget.runs[a].seed, budget.runs[b].seed, name, millions(budget.tokens)));
          return;  // one warning per architecture
        }
}

// One contender with its groups among all ends.
struct Entry {
  std::vector<Budget> budgets;
  std::vector<size_t> groups;     // one per budget
  std::vector<size_t> inside;     // indices of budgets that the ladder covers
  std::vector<size_t> usable;     // those of `inside` without a caveat
  size_t judged = 0;              // index of the budget of the verdict
  std::optional<Estimate> delta;  // of that budget; none when the ladder covers no budget
};

// The slope of the regression line through the differences, over log2 of the tokens.
Contrast trend_of(const Ends& ends, const Entry& entry, Measure measure) {
  std::vector<Contrast> differences;
  std::vector<double> doublings;
  for (const size_t j : entry.usable) {
    differences.push_back(ends.difference(entry.groups[j], measure));
    doublings.push_back(std::log2(entry.budgets[j].tokens));
  }
  const double centre = mean(doublings);
  double squares = 0;
  for (double& x : doublings) {
    x -= centre;
    squares += x * x;
  }
  for (double& x : doublings) x /= squares;
  return combine(differences, doublings);
}

std::string outside_problem(const std::vector<Budget>& ladder, const Ends& ends, const Span& span,
                            double held_out, double overfit_rise) {
  if (held_out > span.high)
    return fmt::format(
        "The held-out loss {:.3f} is above that of every run of the reference ({:.3f} or less); "
        "train longer or add a smaller rung.",
        held_out, span.high);
  if (const Rise rise = rise_until(ends, ladder.size() - 1); rise.nats > overfit_rise)
    return fmt::format(
        "The held-out loss {:.3f} is below that of every run of the reference ({:.3f} or more), "
        "and the reference overfits the training domains before it gets there; "
        "compare at a smaller budget, which ends with a held-out loss of {:.3f} or more, "
        "or train on more text.",
        held_out, span.low, mean_held_out(ladder[rise.from]));
  return fmt::format(
      "The held-out loss {:.3f} is below that of every run of the reference ({:.3f} or more); "
      "add a rung of the reference at about {}.",
      held_out, span.low, millions(tokens_to_reach(ladder, held_out)));
}

// Correlations of the document noise of all members.
std::vector<std::vector<double>> document_link(const std::vector<const Estimate*>& estimates) {
  const auto product = [](const Estimate& a, const Estimate& b) {
    double sum = 0;
    for (size_t d = 0; d < a.influence.size(); ++d)
      for (size_t c = 0; c < a.influence[d].size(); ++c)
        sum += a.influence[d][c] * b.influence[d][c];
    return sum;
  };
  const size_t n = estimates.size();
  std::vector<std::vector<double>> link(n, std::vector<double>(n));
  for (size_t a = 0; a < n; ++a)
    for (size_t b = 0; b < n; ++b) {
      const double scale =
          std::sqrt(product(*estimates[a], *estimates[a]) * product(*estimates[b], *estimates[b]));
      link[a][b] = a == b ? 1 : scale > 0 ? product(*estimates[a], *estimates[b]) / scale : 0;
    }
  return link;
}

void add_ladder_warnings(const std::vector<Budget>& ladder, const Ends& ends,
                         const LadderOptions& options, LadderResult& result) {
  if (ladder.size() == 2)
    result.warnings.push_back(
        "The ladder has two rungs, so the curve between them is a straight line. "
        "No interval counts the error of this line. Add a rung of the reference.");
  for (size_t b = 0; b < ladder.size(); ++b)
    if (ladder[b].runs.size() < 2)
      result.warnings.push_back(
          fmt::format("The rung of {} has one seed; its variance is taken from the other rungs.",
                      millions(ladder[b].tokens)));
  for (size_t b = 0; b + 1 < ladder.size(); ++b) {
    if (ends.loss(b + 1) < ends.loss(b)) continue;
    const bool overfits = rise_until(ends, b + 1).nats > options.overfit_rise;
    result.warnings.push_back(fmt::format(
        "The reference's loss out of domain does not fall from {} to {} ({:.3f} to {:.3f}). {}",
        millions(ladder[b].tokens), millions(ladder[b + 1].tokens), ends.loss(b), ends.loss(b + 1),
        overfits ? "It overfits there, so no verdict is given where this loss has begun to rise."
                 : "Comparisons between these two rungs may change with more seeds of both."));
  }
  for (size_t d = 0; d < ends.domains().size(); ++d)
    if (ends.clusters(d) < 2)
      result.warnings.push_back(
          fmt::format("The domain '{}' has one source; the intervals hold for these texts only.",
                      ends.domains()[d]));
    else if (ends.clusters(d) < kFewClusters)
      result.warnings.push_back(fmt::format(
          "The domain '{}' has only {} sources; the intervals hold for these texts only.",
          ends.domains()[d], ends.clusters(d)));
  for (const double loss : result.recall)
    if (std::isnan(loss)) {
      result.warnings.push_back(
          "The runs have no recall targets, so it is unknown whether the reference is mature.");
      break;
    }
}

// Why none of the budgets, in the order of their tokens, carries a verdict.
std::string why_not_judged(const std::vector<BudgetResult>& budgets) {
  const auto late = std::ranges::find(budgets, false, &BudgetResult::early);
  if (late == budgets.begin() || late == budgets.end())
    return budgets.back().problem + budgets.back().caveat;
  const BudgetResult& early = *std::prev(late);
  return fmt::format("At {} the held-out loss is too high for a comparison ({:.3f}), at {} too low",
                     millions(early.tokens), early.held_out, millions(late->tokens)) +
         fmt::format(" ({:.3f}). Train it with a number of tokens between them.", late->held_out);
}

// Fills in everything that does not depend on the other contenders.
void describe(const std::vector<Budget>& ladder, const std::vector<double>& recall,
              const Ends& ends, Entry& entry, const LadderOptions& options, EndResult& result) {
  const Span span = held_out_span(ladder);
  for (size_t j = 0; j < entry.budgets.size(); ++j) {
    const size_t group = entry.groups[j];
    BudgetResult budget{.tokens = entry.budgets[j].tokens,
                        .held_out = ends.held_out(group),
                        .out_of_domain = ends.loss(group),
                        .problem = "",
                        .caveat = "",
                        .delta = {kNaN, kNaN, kNaN},
                        .seeds = int64_t(ends.seeds(group))};
    if (span.holds(budget.held_out)) {
      entry.inside.push_back(j);
      const Measure average;
      const Estimate delta = ends.estimate(ends.difference(group, average), average);
      budget.delta = interval_of(delta, options.level);
      budget.caveat = immaturity(ladder, recall, ends, budget.held_out, options);
      budget.early = !budget.caveat.empty();
      if (budget.caveat.empty())
        budget.caveat = overfitting(ladder, ends, budget.held_out, options.overfit_rise);
      if (budget.caveat.empty()) entry.usable.push_back(j);
    } else {
      budget.problem = outside_problem(ladder, ends, span, budget.held_out, options.overfit_rise);
      budget.early = budget.held_out > span.high;
    }
    result.budgets.push_back(budget);
  }
  if (entry.inside.empty()) {
    result.reason = why_not_judged(result.budgets);
    return;
  }
  entry.judged = entry.usable.empty() ? entry.inside.back() : entry.usable.back();
  const size_t group = entry.groups[entry.judged];
  const auto of = [&](Measure measure) {
    return ends.estimate(ends.difference(group, measure), measure);
  };
  entry.delta = of({});
  result.has_delta = true;
  result.tokens = entry.budgets[entry.judged].tokens;
  result.held_out = ends.held_out(group);
  result.final_loss = ends.loss(group);
  result.reference_loss = reference_loss_at(ladder, ends, result.tokens);
  result.delta_single = interval_of(*entry.delta, options.level);
  for (size_t d = 0; d < ends.domains().size(); ++d)
    result.domains[ends.domains()[d]] = interval_of(of({.domain = int(d)}), options.level);
  result.recall_part = interval_of(of({.targets = Targets::recall}), options.level);
  result.other_part = interval_of(of({.targets = Targets::other}), options.level);
  result.seed_error = entry.delta->contender_error;
  result.reference_error = entry.delta->reference_error;
  result.document_error = std::sqrt(entry.delta->noise.documents.value);
  result.seed_freedom = entry.delta->seeds().freedom;
  if (entry.usable.size() < 2) return;
  result.has_trend = true;
  result.trend = interval_of(ends.estimate(trend_of(ends, entry, {}), {}), options.level);
}

}  // namespace

LadderResult compare_ends(const std::vector<Budget>& unordered,
                          const std::vector<Contender>& contenders, const LadderOptions& options) {
  if (!(options.level > 0 && options.level < 1))
    fail("level is {}; expected a number between 0 and 1", options.level);
  if (!(options.overfit_rise >= 0))
    fail("overfit_rise is {}; expected 0 or more", options.overfit_rise);
  if (!(options.margin >= 0)) fail("margin is {}; expected 0 or more", options.margin);
  LadderResult result;
  const std::vector<Budget> ladder = in_order(unordered);
  result.problem = problem_of(ladder);
  if (!result.problem.empty()) return result;

  Ends ends(ladder);
  for (size_t b = 0; b < ladder.size(); ++b) result.recall.push_back(ends.recall_loss(b));
  const size_t rungs = ladder.size();
  result.mature = recall_fall(ladder, result.recall, rungs - 2) <= options.maturity_fall &&
                  !(ends.recall_lead(rungs - 1) < options.recall_lead);
  add_ladder_warnings(ladder, ends, options, result);
  warn_of_copies(ladder, "the reference", result);

  std::vector<Entry> entries;
  for (const Contender& contender : contenders) {
    Entry& entry = entries.emplace_back();
    EndResult& one = result.results.emplace_back();
    one.name = contender.name;
    one.reference_loss = kNaN;
    one.reason = contender.budgets.empty()
                     ? fmt::format("'{}' has no finished run; train one.", contender.name)
                     : problem_of(in_order(contender.budgets), "'" + contender.name + "'");
    if (!one.reason.empty()) continue;
    entry.budgets = in_order(contender.budgets);
    warn_of_copies(entry.budgets, "'" + contender.name + "'", result);
    for (const Budget& budget : entry.budgets)
      entry.groups.push_back(ends.add(budget, contender.name));
  }
  if (ends.contender_groups() > 0 && ends.reference_joins())
    result.warnings.push_back(fmt::format(
        "Number of runs of the contenders in addition to the first seed of each budget: {:.0f}. "
        "Their variance needs 3 such runs, so the variance of the reference's seeds was added. "
        "Train more seeds of the contenders.",
        ends.contender_freedom()));

  Family family;
  std::vector<const Estimate*> estimates;
  for (size_t a = 0; a < entries.size(); ++a) {
    if (entries[a].groups.empty()) continue;
    describe(ladder, result.recall, ends, entries[a], options, result.results[a]);
    if (!entries[a].delta) continue;
    estimates.push_back(&*entries[a].delta);
    family.members.push_back(estimates.back()->noise);
    family.freedom = estimates.back()->freedom;
  }
  family.document_link = document_link(estimates);
  result.critical = simultaneous_factor(family, options.level, options.draws);

  for (size_t a = 0; a < entries.size(); ++a) {
    if (!entries[a].delta) continue;
    EndResult& one = result.results[a];
    one.delta = interval_of(*entries[a].delta, options.level, result.critical);
    const BudgetResult& judged = one.budgets[entries[a].judged];
    one.judged = judged.caveat.empty();
    if (!one.judged) {
      one.reason = why_not_judged(one.budgets);
    } else if (!(one.delta.high > one.delta.low)) {
      one.reason =
          "The seeds do not differ at all, so the error is unknown. Are they copies of one run?";
    } else {
      one.verdict = verdict_of(one.delta, options.margin);
      if (one.verdict == Verdict::not_settled)
        one.reason = what_settles(*entries[a].delta, judged.seeds, seeds_per_rung(ladder), options,
                                  result.critical);
    }
    const BudgetResult& largest = one.budgets.back();
    if (entries[a].judged == one.budgets.size() - 1) continue;
    one.note = fmt::format("It is compared at {}. At {}: {}", millions(one.tokens),
                           millions(largest.tokens), largest.problem + largest.caveat);
  }
  return result;
}

double ladder_loss(const std::vector<Budget>& unordered, double held_out) {
  const std::vector<Budget> ladder = in_order(unordered);
  if (ladder.size() < 2 || !problem_of(ladder).empty()) return kNaN;
  if (!held_out_span(ladder).holds(held_out)) return kNaN;
  const Ends ends(ladder);
  return ends.reference_loss(held_out);
}

double ladder_tokens(const std::vector<Budget>& unordered, double held_out) {
  const std::vector<Budget> ladder = in_order(unordered);
  if (ladder.size() < 2 || !problem_of(ladder).empty()) return kNaN;
  std::vector<double> losses;
  for (const Budget& rung : ladder) losses.push_back(mean_held_out(rung));
  if (held_out > losses.front() || held_out < losses.back()) return kNaN;
  const LossOverTokens loss(ladder, losses);
  double few = std::log(ladder.front().tokens), many = std::log(ladder.back().tokens);
  for (int step = 0; step < 60; ++step) {  // to the last bit
    const double middle = (few + many) / 2;
    (loss(middle) > held_out ? few : many) = middle;
  }
  return std::exp(few);
}

}  // namespace assay::stats
