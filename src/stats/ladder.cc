#include "stats/ladder.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>

#include "base/error.h"
#include "stats/contrast.h"
#include "stats/reference.h"
#include "stats/verdict.h"

namespace assay::stats {
namespace {

constexpr Measure kRecallInDomain{.targets = Targets::recall, .text = Text::held_out};
constexpr const char* kNoWidth =
    "The seeds do not differ at all, so the error is unknown. Are they copies of one run?";

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
  std::vector<size_t> groups;  // one per budget
  std::vector<size_t> inside;  // indices of budgets that the ladder covers
  std::vector<size_t> usable;  // those of `inside` without a caveat
  // indices of budgets with a tangent of E, of R
  std::vector<size_t> at_rungs;
  std::vector<size_t> at_recall_rungs;
  size_t judged = 0;  // index of the budget of delta
  // none when no budget can be compared
  std::optional<Estimate> delta;
  std::optional<Estimate> equal_tokens;
  std::optional<Estimate> recall;
};

// The slope of the regression line through the differences, over log2 of the tokens.
Contrast trend_of(const Ends& ends, const Entry& entry) {
  std::vector<Contrast> differences;
  std::vector<double> doublings;
  for (const size_t j : entry.usable) {
    differences.push_back(ends.difference(entry.groups[j], {}));
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

// The mean of E or R over the budgets of a contender.
Contrast mean_equal_tokens(const Ends& ends, const Entry& entry, Measure measure, Line line) {
  std::vector<Contrast> differences;
  std::vector<double> runs;
  for (const size_t j : line == Line::tangent ? entry.at_rungs : entry.at_recall_rungs) {
    differences.push_back(ends.equal_tokens(entry.groups[j], measure, line));
    runs.push_back(double(ends.seeds(entry.groups[j])));
  }
  const double all = mean(runs) * double(runs.size());
  for (double& weight : runs) weight /= all;
  return combine(differences, runs);
}

// The domains are a sample: their mean varies by s² / D, which includes their documents. The
// seeds, the slope and the held-out documents are common to all of them.
Interval over_domains(const Estimate& mean_of_domains, const std::vector<double>& values,
                      double level) {
  if (values.size() < 2) return kNoEstimate;
  if (!mean_of_domains.known) return {mean_of_domains.value, kUnknown, kUnknown};
  const Variance between = seed_variance(ByRun{values});
  const Variance drawn{between.value / double(values.size()), between.freedom};
  const Variance parts[] = {drawn, mean_of_domains.axis_documents};
  return interval(mean_of_domains.value, mean_of_domains.seeds(), sum(parts), level);
}

void check(const LadderOptions& options) {
  if (!(options.level > 0 && options.level < 1))
    fail("level is {}; expected a number between 0 and 1", options.level);
  if (!(options.epochs_ratio >= 1))
    fail("epochs_ratio is {}; expected 1 or more", options.epochs_ratio);
  const std::pair<const char*, double> limits[] = {{"overfit_rise", options.overfit_rise},
                                                   {"margin", options.margin},
                                                   {"recall_margin", options.recall_margin},
                                                   {"tokens_tolerance", options.tokens_tolerance}};
  for (const auto& [name, value] : limits)
    if (!(value >= 0)) fail("{} is {}; expected 0 or more", name, value);
}

class Study {
 public:
  // A ladder in order without a problem.
  Study(const std::vector<Budget>& ladder, const std::vector<Contender>& contenders,
        const LadderOptions& options);

  LadderResult compare();
  std::vector<SeedVariance> variances() const;

 private:
  void add(const Contender& contender);
  BudgetResult inspect(Entry& entry, size_t j);
  void find_tangents(Entry& entry, size_t j, BudgetResult& budget);
  void warn_of_slope(size_t rung);
  size_t judged_budget(const Entry& entry) const;
  void describe_delta(Entry& entry, EndResult& result);
  void describe_equal_tokens(Entry& entry, EndResult& result);
  EqualTokens number(const Entry& entry, Measure measure, Line line,
                     std::optional<Estimate>& estimate) const;
  double factor_of(const std::function<const std::optional<Estimate>&(const Entry&)>& get) const;
  void judge_delta(const Entry& entry, EndResult& result) const;
  void judge(const std::optional<Estimate>& estimate, double margin, double least, double factor,
             EqualTokens& number) const;
  std::string note_of(const Entry& entry, const EndResult& result) const;
  void decide(const Entry& entry, EndResult& result) const;
  std::string agreement_of(const Entry& entry, const EndResult& result) const;

  const std::vector<Budget>& ladder_;
  const LadderOptions& options_;
  Ends ends_;
  Reference reference_;
  std::vector<Entry> entries_;
  LadderResult result_;
};

Study::Study(const std::vector<Budget>& ladder, const std::vector<Contender>& contenders,
             const LadderOptions& options)
    : ladder_(ladder), options_(options), ends_(ladder), reference_(ladder, ends_, options) {
  result_.recall = reference_.recall();
  result_.mature = reference_.mature();
  result_.warnings = reference_.warnings();
  warn_of_copies(ladder_, "the reference", result_);
  for (const Contender& contender : contenders) add(contender);
  ends_.set_table(rows_of_others(options, contenders));
  for (size_t a = 0; a < entries_.size(); ++a)
    for (size_t j = 0; j < entries_[a].groups.size(); ++j)
      result_.results[a].budgets.push_back(inspect(entries_[a], j));
}

void Study::add(const Contender& contender) {
  Entry& entry = entries_.emplace_back();
  EndResult& one = result_.results.emplace_back();
  const std::string name = "'" + contender.name + "'";
  one.name = contender.name;
  one.reference_loss = kUnknown;
  one.reason = contender.budgets.empty() ? fmt::format("{} has no finished run; train one.", name)
                                         : problem_of(in_order(contender.budgets), name);
  one.not_judged = one.equal_tokens.problem = one.recall.problem = one.reason;
  if (!one.reason.empty()) return;
  entry.budgets = in_order(contender.budgets);
  warn_of_copies(entry.budgets, name, result_);
  for (const Budget& budget : entry.budgets)
    entry.groups.push_back(ends_.add(budget, contender.name));
}

// Decides what a budget can be used for. Nothing here depends on a variance.
BudgetResult Study::inspect(Entry& entry, size_t j) {
  const size_t group = entry.groups[j];
  BudgetResult budget{.tokens = entry.budgets[j].tokens,
                      .held_out = ends_.held_out(group),
                      .out_of_domain = ends_.loss(group),
                      .delta = kNoEstimate,
                      .seeds = int64_t(ends_.seeds(group)),
                      .epochs = entry.budgets[j].epochs};
  if (reference_.covers(budget.held_out)) {
    budget.reference_epochs = reference_.epochs_at(budget.held_out);
    entry.inside.push_back(j);
    budget.caveat = reference_.immaturity(budget.held_out);
    budget.early = !budget.caveat.empty();
    if (budget.caveat.empty()) budget.caveat = reference_.overfitting(budget.held_out);
    if (budget.caveat.empty()) budget.caveat = reference_.repetition(entry.budgets[j]);
    if (budget.caveat.empty()) entry.usable.push_back(j);
    if (budget.caveat.empty()) ends_.set_usable(group);
  } else {
    const auto rung = reference_.rung_at(budget.tokens);
    if (rung) budget.problem = reference_.implausible(*rung, budget.held_out);
    if (budget.problem.empty()) budget.problem = reference_.outside(budget.held_out);
    budget.early = reference_.is_above(budget.held_out);
  }
  find_tangents(entry, j, budget);
  return budget;
}

void Study::find_tangents(Entry& entry, size_t j, BudgetResult& budget) {
  const auto rung = reference_.rung_at(budget.tokens);
  std::string problem = rung
                            ? reference_.implausible(*rung, budget.held_out)
                            : fmt::format("The ladder has no rung of {}.", millions(budget.tokens));
  if (problem.empty()) problem = reference_.unequal_epochs(*rung, budget.epochs);
  const auto find = [&](Line line, std::vector<size_t>& budgets) -> std::string {
    const auto tangent = reference_.tangent(*rung, line);
    if (!tangent) return reference_.no_tangent(*rung, line);
    if (tangent->others.empty()) warn_of_slope(*rung);
    budgets.push_back(j);
    ends_.set_tangent(entry.groups[j], line, *tangent);
    return "";
  };
  budget.no_equal_tokens = budget.no_recall = problem;
  if (problem.empty()) budget.no_equal_tokens = find(Line::tangent, entry.at_rungs);
  if (!ends_.has_recall(Text::held_out))
    budget.no_recall =
        "The held-out text of the training domains has no recall targets in the records. "
        "Evaluate the runs again with a later version.";
  else if (problem.empty()) budget.no_recall = find(Line::recall_tangent, entry.at_recall_rungs);
}

void Study::warn_of_slope(size_t rung) {
  const std::string warning = fmt::format(
      "Only one segment of the ladder gives a slope at {}, so half of it is counted as its error. "
      "Add a rung of the reference.",
      millions(ladder_[rung].tokens));
  if (std::ranges::count(result_.warnings, warning) == 0) result_.warnings.push_back(warning);
}

// The largest of the least repeated budgets. Less than one epoch is no repetition.
size_t Study::judged_budget(const Entry& entry) const {
  if (entry.usable.empty()) return entry.inside.back();
  const auto repeated = [&](size_t j) { return std::max(1.0, entry.budgets[j].epochs); };
  double fewest = repeated(entry.usable.front());
  for (const size_t j : entry.usable) fewest = std::min(fewest, repeated(j));
  size_t judged = entry.usable.front();
  for (const size_t j : entry.usable)
    if (repeated(j) <= fewest * (1 + options_.epochs_tolerance)) judged = j;
  return judged;
}

void Study::describe_delta(Entry& entry, EndResult& result) {
  const double level = options_.level;
  const auto of = [&](size_t j, Measure measure) {
    return ends_.estimate(ends_.difference(entry.groups[j], measure), measure);
  };
  for (const size_t j : entry.inside) result.budgets[j].delta = interval_of(of(j, {}), level);
  if (entry.inside.empty()) return;
  const size_t j = entry.judged = judged_budget(entry);
  entry.delta = of(j, {});
  result.has_delta = true;
  result.tokens = entry.budgets[j].tokens;
  result.held_out = ends_.held_out(entry.groups[j]);
  result.final_loss = ends_.loss(entry.groups[j]);
  result.reference_loss = reference_.loss_after(result.tokens);
  result.epochs = result.budgets[j].epochs;
  result.reference_epochs = result.budgets[j].reference_epochs;
  result.delta_single = interval_of(*entry.delta, level);
  std::vector<double> values;
  for (size_t d = 0; d < ends_.domains().size(); ++d) {
    const Estimate one = of(j, {.domain = int(d)});
    values.push_back(one.value);
    result.domains[ends_.domains()[d]] = interval_of(one, level);
  }
  result.over_domains = over_domains(*entry.delta, values, level);
  result.recall_part = interval_of(of(j, {.targets = Targets::recall}), level);
  result.other_part = interval_of(of(j, {.targets = Targets::other}), level);
  if (ends_.has_bounded())
    result.bounded = interval_of(of(j, {.targets = Targets::bounded}), level);
  result.seed_error = entry.delta->contender_error;
  result.reference_error = entry.delta->reference_error;
  result.document_error = std::sqrt(entry.delta->noise.documents.value);
  result.seed_freedom = entry.delta->seeds().freedom;
  result.has_trend = entry.usable.size() >= 2;
  if (result.has_trend)
    result.trend = interval_of(ends_.estimate(trend_of(ends_, entry), {}), level);
}

EqualTokens Study::number(const Entry& entry, Measure measure, Line line,
                          std::optional<Estimate>& estimate) const {
  const auto of = [&](Measure one) {
    return ends_.estimate(mean_equal_tokens(ends_, entry, one, line), one, line);
  };
  EqualTokens found;
  estimate = of(measure);
  found.single = interval_of(*estimate, options_.level);
  found.seed_error = estimate->contender_error;
  found.reference_error = estimate->reference_error;
  found.document_error = std::sqrt(estimate->noise.documents.value);
  found.slope_error = estimate->slope_error;
  found.seed_freedom = estimate->seeds().freedom;
  for (const size_t j : line == Line::tangent ? entry.at_rungs : entry.at_recall_rungs)
    found.runs += int64_t(ends_.seeds(entry.groups[j]));
  std::vector<double> values;
  const auto& domains = ends_.domains(measure.text);
  for (size_t d = 0; d < domains.size(); ++d) {
    const Estimate one = of({int(d), measure.targets, measure.text});
    values.push_back(one.value);
    found.domains[domains[d]] = interval_of(one, options_.level);
  }
  if (measure.text == Text::held_out) return found;
  found.over_domains = over_domains(*estimate, values, options_.level);
  found.recall_part = interval_of(of({.targets = Targets::recall}), options_.level);
  found.other_part = interval_of(of({.targets = Targets::other}), options_.level);
  return found;
}

void Study::describe_equal_tokens(Entry& entry, EndResult& result) {
  const auto of = [&](size_t j, Measure measure, Line line) {
    const Contrast difference = ends_.equal_tokens(entry.groups[j], measure, line);
    return interval_of(ends_.estimate(difference, measure, line), options_.level);
  };
  for (const size_t j : entry.at_rungs) {
    result.budgets[j].slope = ends_.slope(entry.groups[j], {}, Line::tangent);
    result.budgets[j].equal_tokens = of(j, {}, Line::tangent);
  }
  for (const size_t j : entry.at_recall_rungs)
    result.budgets[j].recall = of(j, kRecallInDomain, Line::recall_tangent);
  if (entry.at_rungs.empty()) result.equal_tokens.problem = result.budgets.back().no_equal_tokens;
  else result.equal_tokens = number(entry, {}, Line::tangent, entry.equal_tokens);
  if (entry.at_recall_rungs.empty()) result.recall.problem = result.budgets.back().no_recall;
  else result.recall = number(entry, kRecallInDomain, Line::recall_tangent, entry.recall);
}

double Study::factor_of(
    const std::function<const std::optional<Estimate>&(const Entry&)>& get) const {
  Family family;
  std::vector<const Estimate*> estimates;
  for (const Entry& entry : entries_) {
    const std::optional<Estimate>& one = get(entry);
    if (!one || !one->known) continue;
    estimates.push_back(&*one);
    family.members.push_back(one->noise);
    family.freedom = one->freedom;
  }
  family.document_link = document_link(estimates);
  return simultaneous_factor(family, options_.level, options_.draws);
}

void Study::judge(const std::optional<Estimate>& estimate, double margin, double least,
                  double factor, EqualTokens& number) const {
  if (!estimate) {
    number.reason = number.problem;
    return;
  }
  number.value = interval_of(*estimate, options_.level, factor);
  if (estimate->known && !has_width(number.value)) {
    number.reason = kNoWidth;
    return;
  }
  number.verdict = verdict_of(number.value, margin, least);
  if (number.verdict == Verdict::not_settled)
    number.reason = what_settles(*estimate, number.runs, reference_.seeds_per_rung(), margin,
                                 options_.level, factor);
}

void Study::judge_delta(const Entry& entry, EndResult& result) const {
  if (!entry.delta) {
    if (result.not_judged.empty()) result.not_judged = why_not_judged(result.budgets);
    return;
  }
  const BudgetResult& judged = result.budgets[entry.judged];
  result.delta = interval_of(*entry.delta, options_.level, result_.critical);
  if (!judged.caveat.empty()) {
    result.not_judged = why_not_judged(result.budgets);
  } else if (!entry.delta->known) {
    result.not_judged = what_settles(*entry.delta, judged.seeds, reference_.seeds_per_rung(),
                                     options_.margin, options_.level, result_.critical);
  } else {
    result.judged = true;
    result.verdict =
        has_width(result.delta) ? verdict_of(result.delta, options_.margin) : Verdict::not_settled;
    if (result.verdict == Verdict::not_settled)
      result.reason = has_width(result.delta)
                          ? what_settles(*entry.delta, judged.seeds, reference_.seeds_per_rung(),
                                         options_.margin, options_.level, result_.critical)
                          : kNoWidth;
    result.note = note_of(entry, result);
  }
}

std::string Study::note_of(const Entry& entry, const EndResult& result) const {
  const BudgetResult& largest = result.budgets.back();
  if (entry.judged == result.budgets.size() - 1) return "";
  const std::string problem = largest.problem + largest.caveat;
  return fmt::format(
      "It is judged at {} and not at {}. {}", millions(result.tokens), millions(largest.tokens),
      problem.empty() ? fmt::format("It reads its text {:.1f} times there.", largest.epochs)
                      : problem);
}

std::string Study::agreement_of(const Entry& entry, const EndResult& result) const {
  const Verdict by_tokens = result.equal_tokens.verdict;
  const std::string both = fmt::format("Δ_end is {} and E is {}", signed_nats(entry.delta->value),
                                       signed_nats(entry.equal_tokens->value));
  if (contradict(result.verdict, by_tokens))
    return fmt::format("{}: {} by Δ_end, {} by E. The two contradict each other.", both,
                       verdict_name(result.verdict), verdict_name(by_tokens));
  const Contrast gap = combine({ends_.difference(entry.groups[entry.judged], {}),
                                mean_equal_tokens(ends_, entry, {}, Line::tangent)},
                               {1, -1});
  const Interval x = interval_of(ends_.estimate(gap, {}), options_.level);
  if (!(x.low > 0 || x.high < 0)) return "";
  return fmt::format("{}. Their difference is larger than its error ({} to {}).", both,
                     signed_nats(x.low), signed_nats(x.high));
}

// The verdict of an architecture is that of Delta_end, or that of E if Delta_end carries none.
void Study::decide(const Entry& entry, EndResult& result) const {
  const bool by_tokens = entry.equal_tokens && entry.equal_tokens->known;
  if (result.judged) {
    result.judged_by = "delta_end";
    if (!by_tokens) return;
    result.agreement = agreement_of(entry, result);
    if (!contradict(result.verdict, result.equal_tokens.verdict)) return;
    result.verdict = Verdict::not_settled;
    result.reason = result.agreement;
    return;
  }
  result.reason = result.not_judged;
  if (!by_tokens) return;
  result.judged_by = "equal_tokens";
  result.note = result.not_judged;
  result.verdict = result.equal_tokens.verdict;
  result.reason = result.equal_tokens.reason;
}

LadderResult Study::compare() {
  for (size_t a = 0; a < entries_.size(); ++a) {
    if (entries_[a].groups.empty()) continue;
    describe_delta(entries_[a], result_.results[a]);
    describe_equal_tokens(entries_[a], result_.results[a]);
  }
  using Get = const std::optional<Estimate>&;
  result_.critical = factor_of([](const Entry& entry) -> Get { return entry.delta; });
  const double critical_equal_tokens =
      factor_of([](const Entry& entry) -> Get { return entry.equal_tokens; });
  const double critical_recall = factor_of([](const Entry& entry) -> Get { return entry.recall; });
  for (size_t a = 0; a < entries_.size(); ++a) {
    const Entry& entry = entries_[a];
    EndResult& one = result_.results[a];
    judge_delta(entry, one);
    judge(entry.equal_tokens, options_.margin, 0, critical_equal_tokens, one.equal_tokens);
    judge(entry.recall, options_.recall_margin, options_.recall_margin, critical_recall,
          one.recall);
    decide(entry, one);
  }
  return std::move(result_);
}

std::vector<SeedVariance> Study::variances() const {
  std::vector<Measure> measures{{}};
  for (const Targets targets : {Targets::recall, Targets::other, Targets::bounded})
    if (targets != Targets::bounded || ends_.has_bounded())
      measures.push_back({.targets = targets});
  for (size_t d = 0; d < ends_.domains().size(); ++d) measures.push_back({.domain = int(d)});
  std::vector<SeedVariance> rows;
  for (size_t a = 0; a < entries_.size(); ++a)
    for (size_t j = 0; j < entries_[a].groups.size(); ++j) {
      const size_t group = entries_[a].groups[j];
      SeedVariance row{.study = options_.study,
                       .model = result_.results[a].name,
                       .tokens = entries_[a].budgets[j].tokens,
                       .seeds = int64_t(ends_.seeds(group)),
                       .variance = {}};
      const auto add = [&](Measure measure, Line line) {
        row.variance[ends_.key(measure, line)] = ends_.group_variance(group, measure, line).value;
      };
      for (const Line line : {Line::curve, Line::tangent})
        if (ends_.usable(group, line))
          for (const Measure measure : measures) add(measure, line);
      if (ends_.usable(group, Line::recall_tangent)) {
        add(kRecallInDomain, Line::recall_tangent);
        for (size_t d = 0; d < ends_.domains(Text::held_out).size(); ++d)
          add({int(d), Targets::recall, Text::held_out}, Line::recall_tangent);
      }
      if (row.seeds > 1 && !row.variance.empty()) rows.push_back(std::move(row));
    }
  return rows;
}

}  // namespace

LadderResult compare_ends(const std::vector<Budget>& unordered,
                          const std::vector<Contender>& contenders, const LadderOptions& options) {
  check(options);
  const std::vector<Budget> ladder = in_order(unordered);
  LadderResult result;
  result.problem = problem_of(ladder);
  if (!result.problem.empty()) return result;
  return Study(ladder, contenders, options).compare();
}

std::vector<SeedVariance> seed_variances(const std::vector<Budget>& unordered,
                                         const std::vector<Contender>& contenders,
                                         const LadderOptions& options) {
  check(options);
  const std::vector<Budget> ladder = in_order(unordered);
  if (!problem_of(ladder).empty()) return {};
  return Study(ladder, contenders, options).variances();
}

}  // namespace assay::stats
