// The figure of the tasks.
#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "report/plots.h"
#include "report/table.h"
#include "report/task_scores.h"

namespace assay::report {
namespace {

Series point(const std::string& name, int style, double delta, const stats::Interval& score) {
  return {.name = name,
          .style = style,
          .x = {delta},
          .y = {score.estimate},
          .low = {score.low},
          .high = {score.high},
          .line = false,
          .marker = 5,
          .upright = true};
}

}  // namespace

FigureGroup agreement_plot(const Setting& setting) {
  FigureGroup group{.title = "Does Δ_end predict what the models can do?", .large = true};
  if (setting.task_scores.empty()) return group;
  const std::vector<Agreement> all = task_agreements(setting);
  if (all.empty() || all.front().points.empty() || !all.front().recall) return group;
  const Agreement& recall = all.front();
  group.note = fmt::format(
      "Recall tasks have the answer in the prompt. Budget: {} training tokens. {} {} {}",
      show(double(recall.tokens), Format::tokens), recall.text(), recall.caveat,
      "Bars are individual 95 % intervals.");
  Figure figure{.id = figure_id(setting, "task-agreement"),
                .title = "Recall tasks and Δ_end",
                .x = {.title = "Δ_end, nats per token (right: worse)"},
                .y = {.title = "score, " + recall.name},
                .vertical = 0,
                .band = setting.ladder.options.margin,
                .width = 620};
  if (recall.reference) {
    figure.series.push_back(point(setting.reference().name, 0, 0, *recall.reference));
    figure.series.back().tips = {fmt::format("{}, the reference: {}", setting.reference().name,
                                             show(*recall.reference, Format::loss))};
  }
  for (const Agreement::Point& one : recall.points) {
    figure.series.push_back(point(one.model, one.style, one.delta.estimate, one.score));
    figure.series.back().tips = {fmt::format("{}: Δ_end {}, score {}", one.model,
                                             show(one.delta, Format::change),
                                             show(one.score, Format::loss))};
  }
  group.figures.push_back(std::move(figure));
  return group;
}

}  // namespace assay::report
