#include "stats/ladder.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "base/error.h"
#include "stats/contrast.h"
#include "stats/reference.h"
#include "stats/student.h"

namespace assay::stats {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kMostSeeds = 64;

// With the minus sign of the tables.
std::string signed_nats(double value) {
  return fmt::format("{}{:.3f}", value < 0 ? "−" : "+", std::abs(value));
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
void describe(const Reference& reference, const Ends& ends, Entry& entry, double level,
              EndResult& result) {
  for (size_t j = 0; j < entry.budgets.size(); ++j) {
    const size_t group = entry.groups[j];
    BudgetResult budget{.tokens = entry.budgets[j].tokens,
                        .held_out = ends.held_out(group),
                        .out_of_domain = ends.loss(group),
                        .problem = "",
                        .caveat = "",
                        .delta = {kNaN, kNaN, kNaN},
                        .seeds = int64_t(ends.seeds(group))};
    if (reference.covers(budget.held_out)) {
      entry.inside.push_back(j);
      const Measure average;
      const Estimate delta = ends.estimate(ends.difference(group, average), average);
      budget.delta = interval_of(delta, level);
      budget.caveat = reference.immaturity(budget.held_out);
      budget.early = !budget.caveat.empty();
      if (budget.caveat.empty()) budget.caveat = reference.overfitting(budget.held_out);
      if (budget.caveat.empty()) entry.usable.push_back(j);
    } else {
      budget.problem = reference.outside(budget.held_out);
      budget.early = reference.is_above(budget.held_out);
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
  result.reference_loss = reference.loss_after(result.tokens);
  result.delta_single = interval_of(*entry.delta, level);
  for (size_t d = 0; d < ends.domains().size(); ++d)
    result.domains[ends.domains()[d]] = interval_of(of({.domain = int(d)}), level);
  result.recall_part = interval_of(of({.targets = Targets::recall}), level);
  result.other_part = interval_of(of({.targets = Targets::other}), level);
  result.seed_error = entry.delta->contender_error;
  result.reference_error = entry.delta->reference_error;
  result.document_error = std::sqrt(entry.delta->noise.documents.value);
  result.seed_freedom = entry.delta->seeds().freedom;
  if (entry.usable.size() < 2) return;
  result.has_trend = true;
  result.trend = interval_of(ends.estimate(trend_of(ends, entry, {}), {}), level);
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
  const Reference reference(ladder, ends, options);
  result.recall = reference.recall();
  result.mature = reference.mature();
  result.warnings = reference.warnings();
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
    describe(reference, ends, entries[a], options.level, result.results[a]);
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
        one.reason = what_settles(*entries[a].delta, judged.seeds, reference.seeds_per_rung(),
                                  options, result.critical);
    }
    const BudgetResult& largest = one.budgets.back();
    if (!one.judged || entries[a].judged == one.budgets.size() - 1) continue;
    one.note = fmt::format("It is judged at {} and not at {}. {}", millions(one.tokens),
                           millions(largest.tokens), largest.problem + largest.caveat);
  }
  return result;
}

}  // namespace assay::stats
