#include "report/contents.h"

#include "report/tables.h"

namespace assay::report {
namespace {

bool is_empty(const Item& item) {
  if (const auto* table = std::get_if<Table>(&item.content)) return table->rows.empty();
  return std::get<FigureGroup>(item.content).figures.empty();
}

}  // namespace

std::vector<Item> contents(const Setting& s) {
  const std::string ends = "The ends of runs";
  const std::string rates = "Learning rates";
  const std::string training = "Along training";
  const std::string cost = "Speed and memory";
  const std::string tasks = "Tasks";
  const std::string inside = "What the models do";
  const std::string models = "Models";
  const std::string second = "Secondary measure";
  std::vector<Item> all = {
      {"", verdict_table(s)},
      {ends, ladder_plot(s)},
      {ends, ladder_plots_by_domain(s)},
      {ends, equal_tokens_table(s)},
      {ends, early_table(s)},
      {ends, loss_table(s)},
      {ends, domain_table(s)},
      {ends, domain_forest(s)},
      {ends, wide_table(s)},
      {ends, recall_table(s)},
      {ends, recall_forest(s)},
      {ends, budget_table(s)},
      {ends, budget_plots(s)},
      {ends, prediction_table(s)},
      {ends, ladder_table(s)},
      {ends, overlap_table(s)},
      {tasks, task_table(s)},
      {tasks, task_difference_table(s)},
      {tasks, agreement_plot(s)},
      {tasks, task_agreement_table(s)},
      {rates, tuning_table(s)},
      {rates, tuning_plots(s)},
      {rates, check_table(s)},
      {training, training_curves(s)},
      {training, slice_table(s)},
      {cost, speed_table(s)},
      {inside, probe_table(s)},
      {inside, entropy_plots(s)},
      {models, ablation_plots(s)},
      {models, differing_table(s)},
      {models, common_table(s), true},
      {second, degradation_table(s)},
      {second, difference_plots(s)},
      {second, convergence_table(s)},
      {"", slice_detail_table(s)},
      {"", evaluation_table(s)},
      {"", entropy_table(s)},
      {"", task_run_table(s)},
  };
  std::erase_if(all, is_empty);
  return all;
}

}  // namespace assay::report
