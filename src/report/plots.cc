// The figures of what happens along training.
#include "report/plots.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "base/progress.h"

namespace assay::report {
namespace {

constexpr double kLeastDifference = 0.04;  // nats

// One line per run; `get_x` and `get_y` read an evaluation.
template <class X, class Y>
std::vector<Series> lines(const Setting& setting, X&& get_x, Y&& get_y) {
  std::vector<Series> out;
  for (const Architecture& a : setting.architectures)
    for (const Run* run : a.all_runs()) {
      Series series{.name = a.name, .style = a.style};
      for (const Evaluation& e : run->evaluations) {
        const double x = get_x(e);
        const double y = get_y(e);
        if (!std::isfinite(x) || !std::isfinite(y)) continue;
        series.x.push_back(x);
        series.y.push_back(y);
      }
      out.push_back(std::move(series));
    }
  return out;
}

// A symbol at the end of every line tells architectures apart without colour.
std::vector<Series> with_end_symbols(std::vector<Series> all) {
  std::vector<Series> out;
  for (Series& series : all) {
    series.marker = 0;
    Series end{.name = series.name, .style = series.style, .line = false, .marker = 4};
    if (!series.x.empty()) {
      end.x.push_back(series.x.back());
      end.y.push_back(series.y.back());
    }
    out.push_back(std::move(series));
    out.push_back(std::move(end));
  }
  return out;
}

// The later two thirds of every line, where architectures differ. The first losses of training
// would otherwise fill the figure.
void focus(Figure& figure) {
  double left = INFINITY;
  double right = -INFINITY;
  double bottom = INFINITY;
  double top = -INFINITY;
  for (const Series& s : figure.series)
    for (size_t i = s.x.size() / 3; i < s.x.size(); ++i) {
      left = std::min(left, s.x[i]);
      right = std::max(right, s.x[i]);
      bottom = std::min(bottom, s.y[i]);
      top = std::max(top, s.y[i]);
    }
  if (!(left < right && bottom < top)) return;
  const double side = 0.06 * (right - left);
  const double above = 0.06 * (top - bottom);
  figure.x.range = {left - side, right + side};
  figure.y.range = {bottom - above, top + above};
}

Figure along_training(const Setting& setting, Kind kind) {
  const std::string loss = setting.test_name();
  const char* title = setting.mixed ? "Held-out loss" : "Loss out of domain";
  Figure figure{.id = figure_id(setting, fmt::format("along-{}", name(kind))),
                .title = fmt::format("{} against {} loss", title, name(kind)),
                .x = {.title = fmt::format("{} loss, nats per token", name(kind))},
                .y = {.title = loss + ", nats per token"},
                .identity = true};
  figure.series = lines(
      setting, [&](const Evaluation& e) { return e.pretraining_loss(kind); },
      [](const Evaluation& e) { return e.test_loss; });
  focus(figure);
  figure.series = with_end_symbols(std::move(figure.series));
  return figure;
}

Figure difference(const Setting& setting, Kind kind) {
  Figure figure{
      .id = figure_id(setting, fmt::format("difference-{}", name(kind))),
      .title = fmt::format("Difference at equal {} loss", name(kind)),
      .x = {.title = fmt::format("{} loss, nats per token", name(kind))},
      .y = {.title = std::string(setting.test_name()) + " − reference", .least = kLeastDifference},
      .horizontal = 0};
  for (const Architecture& a : setting.architectures)
    for (const Comparison& c : a.comparisons) {
      if (c.kind != kind || c.profile.empty()) continue;
      Series series{.name = a.name, .style = a.style};
      for (auto point = c.profile.rbegin(); point != c.profile.rend(); ++point) {
        series.x.push_back(point->first);
        series.y.push_back(point->second);
      }
      figure.series.push_back(std::move(series));
    }
  return figure;
}

Figure curve(const Setting& setting, const std::string& file, const std::string& title,
             double (*get)(const Evaluation&)) {
  Figure figure{.id = figure_id(setting, file),
                .title = title,
                .x = {.title = "training tokens"},
                .y = {.title = "loss, nats per token"}};
  figure.series = lines(setting, [](const Evaluation& e) { return e.tokens; }, get);
  double last = 0;
  double bottom = INFINITY;
  double top = -INFINITY;
  for (const Series& series : figure.series)
    for (size_t i = 0; i < series.x.size(); ++i) {
      last = std::max(last, series.x[i]);
      bottom = std::min(bottom, series.y[i]);
      if (i >= std::min(series.x.size() - 1, 1 + series.x.size() / 10))
        top = std::max(top, series.y[i]);
    }
  figure.series = with_end_symbols(std::move(figure.series));
  if (!(bottom < top)) return figure;
  figure.x.range = {0, last * 1.04};
  figure.y.range = {bottom - 0.05 * (top - bottom), top + 0.05 * (top - bottom)};
  return figure;
}

// NaN for none.
double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / double(values.size());
}

Figure entropy_by_layer(const Setting& setting) {
  Figure figure{.id = figure_id(setting, "attention-entropy-by-layer"),
                .title = "At the end, mean over heads",
                .x = {.title = "layer"},
                .y = {.title = "attention entropy"}};
  size_t layers_shown = 0;
  for (const Architecture& a : setting.architectures)
    for (const Run& run : a.runs()) {
      Series series{.name = a.name, .style = a.style};
      const auto& layers = run.evaluations.back().attention_entropy;
      for (size_t i = 0; i < layers.size(); ++i) {
        if (layers[i].empty()) continue;
        series.x.push_back(double(i));
        series.y.push_back(mean(layers[i]));
        layers_shown = std::max(layers_shown, i + 1);
      }
      if (!series.x.empty()) figure.series.push_back(std::move(series));
    }
  const size_t step = layers_shown / 12 + 1;
  for (size_t i = 0; i < layers_shown; i += step)
    figure.x.ticks.emplace_back(double(i), std::to_string(i));
  return figure;
}

}  // namespace

FigureGroup training_curves(const Setting& setting) {
  FigureGroup group{.title = "Curves along training",
                    .note =
                        "One line per run, at every budget; a symbol marks its end. "
                        "The training loss is smoothed with lines fitted to neighbouring steps. "
                        "Points along a run have different learning rates, "
                        "so they carry no verdict."};
  group.figures.push_back(curve(setting, "curve-training", "Training loss",
                                [](const Evaluation& e) { return e.training_loss; }));
  group.figures.push_back(curve(setting, "curve-held-out", "Held-out loss, training domains",
                                [](const Evaluation& e) { return e.held_out_loss; }));
  if (!setting.mixed)
    group.figures.push_back(curve(setting, "curve-out-of-domain", "Loss out of domain, mean",
                                  [](const Evaluation& e) { return e.test_loss; }));
  group.figures.push_back(along_training(setting, setting.kinds.front()));
  return group;
}

FigureGroup difference_plots(const Setting& setting) {
  FigureGroup group{.title = "Secondary: the difference along training",
                    .note =
                        "The mean of each line is the number in the table above. "
                        "It has the same biases."};
  for (const Kind kind : setting.kinds)
    if (Figure figure = difference(setting, kind); !figure.series.empty())
      group.figures.push_back(std::move(figure));
  return group;
}

FigureGroup entropy_plots(const Setting& setting) {
  FigureGroup group{.title = "Attention entropy",
                    .note =
                        "The queries are those in the second half of held-out text. "
                        "The entropy of their softmax weights is divided by its maximum: "
                        "ln of the number of positions that they see. "
                        "1 is all positions alike, 0 is one position. One line per run. "
                        "Every layer and head at every evaluation: tables/attention-entropy.csv. "
                        "Records have those of the last evaluation."};
  Figure along{.id = figure_id(setting, "attention-entropy"),
               .title = "Mean over layers and heads",
               .x = {.title = "training tokens"},
               .y = {.title = "attention entropy"}};
  along.series = lines(
      setting, [](const Evaluation& e) { return e.tokens; },
      [](const Evaluation& e) { return e.mean_attention_entropy; });
  std::erase_if(along.series, [](const Series& series) { return series.x.empty(); });
  if (along.series.empty()) return group;
  along.series = with_end_symbols(std::move(along.series));
  group.figures.push_back(std::move(along));
  group.figures.push_back(entropy_by_layer(setting));
  return group;
}

}  // namespace assay::report
