#pragma once
// The figures of a report, made from what a study found.
#include "report/analysis.h"
#include "report/figures.h"

namespace assay::report {

struct FigureGroup {
  std::string title, note;
  std::vector<Figure> figures;
};

// Pre-training loss against test loss, per domain and in the mean, with the identity line; one group a kind of loss.
FigureGroup scatter_plots(const Setting& setting, Kind kind);
// Δ with its interval, per domain and in the mean; one figure a kind of loss.
FigureGroup forest_plots(const Setting& setting);
// Losses over training tokens.
FigureGroup training_curves(const Setting& setting);
// Entropy of the softmax weights over training tokens, and by layer at the end; no figures where nothing has any.
FigureGroup entropy_plots(const Setting& setting);
// Δ, and the entropy at the end, over each hyper-parameter of a model in which two or more differ and in nothing else.
FigureGroup ablation_plots(const Setting& setting);

}  // namespace assay::report
