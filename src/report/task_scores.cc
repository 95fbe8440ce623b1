#include "report/task_scores.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "base/error.h"
#include "report/analysis.h"
#include "report/table.h"
#include "stats/prediction.h"

namespace assay::report {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
constexpr size_t kMostNames = 8;  // of runs in a sentence

// Metrics whose mean is a row.
struct Measure {
  std::string name;
  std::string metric;
  bool recall = false;
  std::vector<std::pair<const run::TaskQuestion*, std::string>> parts;  // with a metric of each
  stats::ScoreKind kind() const {
    return run::is_likelihood(metric) ? stats::ScoreKind::number : stats::ScoreKind::share;
  }
};

const run::TaskResult* result_of(const Run& run, const run::TaskQuestion& question) {
  for (const run::TaskResult& result : run.data.tasks)
    if (result.name == question.name && result.key == question.key && result.problem.empty() &&
        result.items == question.items)
      return &result;
  return nullptr;
}

stats::RunScore score_of(const run::TaskMetric& metric, int64_t items) {
  if (metric.bits) return stats::run_score(run::values_of(*metric.bits, items));
  const auto blocks = size_t(std::min(items, run::TaskMetric::kBlocks));
  if (!metric.sums || !metric.weights || metric.sums->size() != blocks ||
      metric.weights->size() != blocks)
    fail("A result of a task does not have {} values of its metric '{}'.", blocks, metric.name);
  return stats::run_score(*metric.sums, *metric.weights);
}

std::optional<stats::RunScore> score_of(const Run& run, const Measure& measure) {
  std::vector<stats::RunScore> parts;
  for (const auto& [question, name] : measure.parts) {
    const run::TaskResult* result = result_of(run, *question);
    if (!result) return {};
    const auto metric = std::ranges::find(result->metrics, name, &run::TaskMetric::name);
    if (metric == result->metrics.end()) return {};
    parts.push_back(score_of(*metric, result->items));
  }
  return parts.size() == 1 ? parts[0] : stats::mean_score(parts);
}

stats::RunScores scores_of(const std::vector<Run>& runs, const Measure& measure) {
  stats::RunScores out;
  for (const Run& run : runs)
    if (auto score = score_of(run, measure)) out.push_back(std::move(*score));
  return out;
}

using ByBudget = std::map<int64_t, stats::RunScores>;  // budgets with a score
ByBudget scores_of(const Architecture& a, const Measure& measure) {
  ByBudget out;
  for (const auto& [tokens, runs] : a.budgets)
    if (auto scores = scores_of(runs, measure); !scores.empty()) out[tokens] = std::move(scores);
  return out;
}

// The first metric of the task that is a share; "" for none.
std::string share_metric(const run::TaskQuestion& question) {
  for (const std::string& metric : question.metrics)
    if (!run::is_likelihood(metric)) return metric;
  return "";
}

Measure mean_measure(const Setting& setting, bool recall) {
  Measure mean{.recall = recall};
  for (const run::TaskQuestion& question : setting.tasks)
    if (question.recall == recall && !share_metric(question).empty())
      mean.parts.emplace_back(&question, share_metric(question));
  mean.name = fmt::format("mean of {} {} tasks", mean.parts.size(), recall ? "recall" : "other");
  return mean;
}

Measure measure_of(const run::TaskQuestion& question, const std::string& metric) {
  return {.name = question.name,
          .metric = metric,
          .recall = question.recall,
          .parts = {{&question, metric}}};
}

std::vector<Measure> all_measures(const Setting& setting) {
  std::vector<Measure> out;
  for (const run::TaskQuestion& question : setting.tasks)
    for (const std::string& metric : question.metrics) out.push_back(measure_of(question, metric));
  for (const bool recall : {true, false})
    if (Measure mean = mean_measure(setting, recall); mean.parts.size() > 1)
      out.push_back(std::move(mean));
  return out;
}

// The scores of all architectures on one measure, and the noise of their seeds.
struct Scored {
  const Setting& setting;
  const Measure& measure;
  std::vector<ByBudget> models;  // in the order of the architectures
  stats::SeedNoise noise;

  Scored(const Setting& of, const Measure& on) : setting(of), measure(on) {
    std::vector<stats::RunScores> groups;
    for (const Architecture& a : setting.architectures) {
      models.push_back(scores_of(a, measure));
      for (const auto& [tokens, scores] : models.back()) groups.push_back(scores);
    }
    noise = stats::seed_noise(groups);
  }

  const stats::RunScores* of_reference(int64_t tokens) const {
    if (!setting.has_reference()) return nullptr;
    const auto found = models.front().find(tokens);
    return found == models.front().end() ? nullptr : &found->second;
  }

  stats::Interval value(const stats::RunScores& runs) const {
    const stats::Interval found = stats::score_interval(runs, noise, measure.kind());
    if (measure.kind() == stats::ScoreKind::share) return found;
    const auto shown = [&](double mean) { return run::likelihood_metric(measure.metric, mean); };
    return {shown(found.estimate), shown(found.high), shown(found.low)};
  }

  stats::Interval difference(const stats::RunScores& runs,
                             const stats::RunScores& reference) const {
    const stats::Interval found = stats::score_difference(runs, reference, noise, measure.kind());
    if (measure.kind() == stats::ScoreKind::share) return found;
    const auto shown = [&](double d) { return run::likelihood_difference(measure.metric, d); };
    return {shown(found.estimate), shown(found.high), shown(found.low)};
  }
};

// The budget of an architecture in the tables.
int64_t budget_of(const Scored& scored, size_t model) {
  const ByBudget& own = scored.models[model];
  for (auto at = own.rbegin(); at != own.rend(); ++at)
    if (model != 0 && scored.of_reference(at->first)) return at->first;
  // The reference itself: the largest budget that another architecture shares with it
  if (model == 0 && scored.setting.has_reference())
    for (auto at = own.rbegin(); at != own.rend(); ++at)
      for (size_t other = 1; other < scored.models.size(); ++other)
        if (scored.models[other].contains(at->first)) return at->first;
  return own.empty() ? 0 : own.rbegin()->first;
}

std::optional<Score> score_of(const Scored& scored, size_t model) {
  const int64_t tokens = budget_of(scored, model);
  const auto found = scored.models[model].find(tokens);
  if (found == scored.models[model].end()) return {};
  int64_t items = 0;
  for (const auto& [question, metric] : scored.measure.parts) items += question->items;
  Score score{.tokens = tokens,
              .seeds = std::ssize(found->second),
              .items = items,
              .value = scored.value(found->second),
              .difference = {kNone, kNone, kNone}};
  const bool is_reference = scored.setting.architectures[model].style == 0;
  if (const auto* reference = scored.of_reference(tokens); reference && !is_reference)
    score.difference = scored.difference(found->second, *reference);
  return score;
}

const stats::BudgetResult* delta_of(const Architecture& a, int64_t tokens) {
  for (const stats::BudgetResult& budget : a.end.budgets)
    if (int64_t(budget.tokens) == tokens && budget.problem.empty()) return &budget;
  return nullptr;
}

// The budget at which most architectures have Δ_end and a score; the largest of several.
int64_t common_budget(const Scored& scored) {
  std::map<int64_t, int64_t> counts;
  for (size_t i = 0; i < scored.models.size(); ++i)
    for (const auto& [tokens, scores] : scored.models[i])
      counts[tokens] += delta_of(scored.setting.architectures[i], tokens) != nullptr;
  int64_t best = 0;
  int64_t most = 0;
  for (const auto& [tokens, count] : counts)
    if (count > 0 && count >= most) {
      best = tokens;
      most = count;
    }
  return best;
}

Agreement agreement_of(const Setting& setting, const Measure& measure) {
  const Scored scored(setting, measure);
  Agreement out{.name = measure.name,
                .recall = measure.recall,
                .tokens = common_budget(scored),
                .tau = {kNone, kNone, kNone}};
  std::vector<double> deltas;
  std::vector<double> scores;
  for (size_t i = 0; i < scored.models.size(); ++i) {
    const Architecture& a = setting.architectures[i];
    const auto found = scored.models[i].find(out.tokens);
    if (found == scored.models[i].end()) continue;
    if (a.style == 0) out.reference = scored.value(found->second);
    const stats::BudgetResult* end = delta_of(a, out.tokens);
    if (a.style == 0 || !end) continue;
    if (out.caveat.empty()) out.caveat = end->caveat;
    out.points.push_back({a.name, a.style, end->delta, scored.value(found->second)});
    deltas.push_back(out.points.back().delta.estimate);
    scores.push_back(out.points.back().score.estimate);
  }
  out.tau = stats::kendall_interval(deltas, scores);
  return out;
}

}  // namespace

std::vector<TaskScores> task_scores(const Setting& setting) {
  std::vector<TaskScores> out;
  for (const Measure& measure : all_measures(setting)) {
    const Scored scored(setting, measure);
    TaskScores row{.name = measure.name, .metric = measure.metric, .recall = measure.recall};
    for (size_t i = 0; i < scored.models.size(); ++i) row.scores.push_back(score_of(scored, i));
    if (std::ranges::any_of(row.scores, [](const auto& score) { return score.has_value(); }))
      out.push_back(std::move(row));
  }
  return out;
}

std::string Agreement::text() const {
  if (tokens == 0) return fmt::format("{}: no architecture has a Δ_end and a score.", name);
  const std::string where =
      fmt::format("{}, {} architecture{} at {} tokens", name, points.size(),
                  points.size() == 1 ? "" : "s", show(double(tokens), Format::tokens));
  if (points.size() < stats::kFewestRanks)
    return fmt::format("{}: too few models for a correlation (at least {} are needed).", where,
                       stats::kFewestRanks);
  if (!std::isfinite(tau.estimate))
    return fmt::format("{}: all scores are equal, so there is no order to compare.", where);
  return fmt::format("{}: Kendall's τ is {}.", where, show(tau, Format::change));
}

std::vector<Agreement> task_agreements(const Setting& setting) {
  std::vector<Agreement> out;
  if (setting.tasks.empty()) return out;
  std::vector<Measure> measures;
  for (const bool recall : {true, false}) {
    Measure mean = mean_measure(setting, recall);
    if (mean.parts.size() > 1) measures.push_back(std::move(mean));
    else if (mean.parts.size() == 1 && !recall)
      measures.push_back(measure_of(*mean.parts[0].first, mean.parts[0].second));
  }
  for (const run::TaskQuestion& question : setting.tasks)
    if (question.recall && !share_metric(question).empty())
      measures.push_back(measure_of(question, share_metric(question)));
  for (const Measure& measure : measures) out.push_back(agreement_of(setting, measure));
  return out;
}

std::vector<RunTask> run_tasks(const Setting& setting, const Run& run) {
  std::vector<RunTask> out;
  for (const run::TaskQuestion& question : setting.tasks) {
    const run::TaskResult* result = result_of(run, question);
    if (!result) {
      out.push_back({.task = question.name, .value = kNone, .problem = "not evaluated yet"});
      for (const run::TaskResult& other : run.data.tasks)
        if (other.name == question.name && !other.problem.empty())
          out.back().problem = other.problem;
      continue;
    }
    for (const std::string& metric : question.metrics) {
      const auto score = score_of(run, measure_of(question, metric));
      if (!score) continue;
      const bool likelihood = run::is_likelihood(metric);
      out.push_back(
          {.task = question.name,
           .metric = metric,
           .value = likelihood ? run::likelihood_metric(metric, score->value) : score->value,
           .items = result->items,
           .truncated = result->truncated});
    }
  }
  return out;
}

std::vector<std::string> task_cautions(const Setting& setting) {
  std::map<std::string, std::map<std::string, std::vector<std::string>>> reasons;  // tasks by run
  for (const Architecture& a : setting.architectures)
    for (const Run* run : a.all_runs())
      for (const RunTask& row : run_tasks(setting, *run))
        if (!row.problem.empty()) reasons[row.problem][run->name].push_back(row.task);
  std::vector<std::string> out;
  for (const auto& [reason, by_run] : reasons) {
    std::vector<std::string> names;
    for (const auto& [run, tasks] : by_run)
      names.push_back(
          tasks.size() == setting.tasks.size() ? run : fmt::format("{} ({})", run, join(tasks)));
    const size_t more = names.size() - std::min(names.size(), kMostNames);
    names.resize(names.size() - more);
    out.push_back(fmt::format("Results of tasks are missing ({}): {}{}.", reason, join(names),
                              more ? fmt::format(" and {} more runs", more) : ""));
  }
  return out;
}

}  // namespace assay::report
