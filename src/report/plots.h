#pragma once
// The figures of a report.
#include "report/analysis.h"
#include "report/figures.h"

namespace assay::report {

struct FigureGroup {
  std::string title;
  std::string note;
  std::vector<Figure> figures = {};
  bool large = false;  // the figures fill the width of the page
};

// The ends of runs against the ladder of the reference: the mean over domains, and each domain.
FigureGroup ladder_plot(const Setting& setting);
FigureGroup ladder_plots_by_domain(const Setting& setting);
FigureGroup domain_forest(const Setting& setting);  // Δ_end by domain
FigureGroup recall_forest(const Setting& setting);  // its parts on recall targets and on others
FigureGroup budget_plots(const Setting& setting);   // Δ_end over the budget
// Score on recall tasks over Δ_end; no figure without recall tasks.
FigureGroup agreement_plot(const Setting& setting);
FigureGroup tuning_plots(const Setting& setting);  // held-out loss over the learning rate
// Losses over training tokens, and along training against each other.
FigureGroup training_curves(const Setting& setting);
// Differences along training; the secondary measure is their mean.
FigureGroup difference_plots(const Setting& setting);
// Entropy of the softmax weights over training tokens, and by layer at the end; no figures where
// no architecture has softmax weights.
FigureGroup entropy_plots(const Setting& setting);
// Δ_end, and the entropy at the end, over each hyper-parameter under [model] in which two or more
// models differ and in nothing else.
FigureGroup ablation_plots(const Setting& setting);

std::string figure_id(const Setting& setting, const std::string& name);

}  // namespace assay::report
