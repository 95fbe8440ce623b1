// The tables of the tasks.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "report/tables.h"
#include "report/task_scores.h"
#include "stats/prediction.h"

namespace assay::report {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

std::string metric_name(const TaskScores& row) {
  return row.metric.empty() ? "share of right items" : row.metric;
}

int64_t items_of(const TaskScores& row) {
  for (const auto& score : row.scores)
    if (score) return score->items;
  return 0;
}

// The budget of a column; "" where a model has no score. The budgets of its rows differ where tasks
// failed.
std::string budgets_of(const std::vector<TaskScores>& rows, size_t model) {
  std::vector<std::string> budgets;
  for (const TaskScores& row : rows) {
    if (!row.scores[model]) continue;
    const std::string tokens = show(double(row.scores[model]->tokens), Format::tokens);
    if (!std::ranges::count(budgets, tokens)) budgets.push_back(tokens);
  }
  return join(budgets, " or ");
}

// Tasks in rows, the architectures from `first` on in columns.
Table matrix(const Setting& setting, Table table, size_t first, Format format,
             stats::Interval Score::* cell) {
  table.columns = {{"task"}, {"metric"}, {"recall task"}, {"items"}};
  std::vector<Cell> budgets = {"training tokens", "", "", ""};
  for (size_t i = first; i < setting.architectures.size(); ++i) {
    table.columns.push_back({setting.architectures[i].name, format});
    budgets.push_back(budgets_of(setting.task_scores, i));
  }
  for (const TaskScores& scores : setting.task_scores) {
    std::vector<Cell> row = {scores.name, metric_name(scores), scores.recall ? "yes" : "no",
                             std::to_string(items_of(scores))};
    for (size_t i = first; i < setting.architectures.size(); ++i)
      row.push_back(scores.scores[i] ? Cell((*scores.scores[i]).*cell) : Cell(kNone));
    table.rows.push_back(std::move(row));
  }
  if (!table.rows.empty()) table.rows.insert(table.rows.begin(), std::move(budgets));
  return table;
}

bool has_seeds(const Setting& setting) {
  for (const Architecture& a : setting.architectures)
    for (const auto& [tokens, runs] : a.budgets)
      if (runs.size() > 1) return true;
  return false;
}

std::string about_intervals(const Setting& setting) {
  if (has_seeds(setting)) return "The 95 % intervals count items and seeds.";
  return "Every model has one run: the 95 % intervals count items, and not seeds.";
}

}  // namespace

Table task_table(const Setting& setting) {
  return matrix(setting,
                {.id = table_id(setting, "tasks"),
                 .title = "Tasks on the final weights",
                 .note = "Means over the seeds, at the largest budget that the reference shares. " +
                         about_intervals(setting)},
                0, Format::factor, &Score::value);
}

Table task_difference_table(const Setting& setting) {
  if (!setting.has_reference() || setting.architectures.size() < 2) return {};
  Table table = matrix(setting,
                       {.id = table_id(setting, "task-differences"),
                        .title = "Differences to the reference on the tasks",
                        .note = "At the same number of training tokens, paired by item. "
                                "Of perplexities, the logarithms are compared. "
                                "Each interval has 95 % coverage by itself."},
                       1, Format::change, &Score::difference);
  return table;
}

Table task_agreement_table(const Setting& setting) {
  Table table{.id = table_id(setting, "task-agreement"),
              .title = "Does Δ_end predict the scores?",
              .note =
                  "Kendall's rank correlation between Δ_end and the score, at one budget, "
                  "over all architectures but the reference. "
                  "Below zero: the more degraded, the lower the score. "
                  "The interval takes the architectures as independent draws; "
                  "it has no term for the errors of Δ_end and of the scores.",
              .columns = {{"score"},
                          {"tokens", Format::tokens},
                          {"architectures"},
                          {"Kendall's τ with 95 % interval", Format::change},
                          {"note"}}};
  if (setting.task_scores.empty()) return table;
  for (const Agreement& found : task_agreements(setting)) {
    const size_t count = found.points.size();
    std::string note = found.caveat;
    if (count < stats::kFewestRanks) note = "too few models for a correlation";
    else if (!std::isfinite(found.tau.estimate)) note = "all scores are equal";
    table.rows.push_back({found.name, found.tokens > 0 ? double(found.tokens) : kNone,
                          std::to_string(count), found.tau, note});
  }
  return table;
}

Table task_run_table(const Setting& setting) {
  Table table{.id = table_id(setting, "task-runs"),
              .title = "Tasks by run",
              .columns = {{"run"},
                          {"architecture"},
                          {"tokens", Format::tokens},
                          {"seed"},
                          {"task"},
                          {"metric"},
                          {"value", Format::loss},
                          {"items"},
                          {"truncated items"},
                          {"problem"}},
              .shown = false};
  for (const Architecture& a : setting.architectures)
    for (const Run* run : a.all_runs())
      for (const RunTask& row : run_tasks(setting, *run))
        table.rows.push_back({run->name, a.name, double(run->tokens), std::to_string(run->seed),
                              row.task, row.metric, row.value, std::to_string(row.items),
                              std::to_string(row.truncated), row.problem});
  return table;
}

}  // namespace assay::report
