#include "report/plots.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"

namespace assay::report {
namespace {

constexpr double kLeastDifference = 0.04;  // nats

std::string id(const Setting& setting, const std::string& name) {
  return setting.name.empty() ? name : setting.name + "-" + name;
}

// One line a run; `get_x` and `get_y` read an evaluation.
template <class X, class Y>
std::vector<Series> lines(const Setting& setting, X&& get_x, Y&& get_y) {
  std::vector<Series> out;
  for (const Architecture& a : setting.architectures)
    for (const Run& run : a.runs) {
      Series series{a.name, a.style, {}, {}, {}, {}};
      for (const Evaluation& e : run.evaluations)
        if (std::isfinite(get_x(e)) && std::isfinite(get_y(e)))
          series.x.push_back(get_x(e)), series.y.push_back(get_y(e));
      out.push_back(std::move(series));
    }
  return out;
}

// The later two thirds of every line: where architectures are told apart. The first losses of training would otherwise
// fill the figure. The corner of the identity line that is nearest stays in sight.
void focus(Figure& figure) {
  double left = INFINITY, right = -INFINITY, bottom = INFINITY, top = -INFINITY;
  for (const Series& s : figure.series)
    for (size_t i = s.x.size() / 3; i < s.x.size(); ++i) {
      left = std::min(left, s.x[i]), right = std::max(right, s.x[i]);
      bottom = std::min(bottom, s.y[i]), top = std::max(top, s.y[i]);
    }
  if (!(left < right && bottom < top)) return;
  const double margin = 0.06 * (right - left);
  left -= margin, right += margin;
  bottom = std::min(bottom, right - 0.2 * (right - left)), top = std::max(top, left + 0.2 * (right - left));
  figure.x.range = {left, right};
  figure.y.range = {bottom - 0.06 * (top - bottom), top + 0.06 * (top - bottom)};
}

std::string axis_title(Kind kind) {
  return kind == Kind::held_out ? "held-out loss, training domains (nats)" : "training loss (nats)";
}

Figure scatter(const Setting& setting, Kind kind, const std::string& domain) {
  const bool mean = domain.empty();
  Figure figure{id(setting, fmt::format("{}-{}", name(kind), mean ? "mean" : domain)),
                mean ? "mean of the domains" : domain,
                {axis_title(kind), false, {}, {}},
                {setting.mixed ? "held-out loss (nats)" : "loss out of domain (nats)", false, {}, {}},
                {}};
  figure.series = lines(
      setting, [&](const Evaluation& e) { return e.pretraining_loss(kind); },
      [&](const Evaluation& e) { return mean ? e.test_loss : e.test_losses.at(domain); });
  if (kind == Kind::training)
    for (Series& series : figure.series) series.line = false;  // noise from step to step would draw a tangle
  figure.identity = true;
  focus(figure);
  return figure;
}

// Rows from the top: an architecture with its mean, then its domains, then the next architecture.
Figure forest(const Setting& setting, Kind kind) {
  Figure figure{id(setting, fmt::format("delta-{}", name(kind))),
                fmt::format("Δ at equal {} loss", name(kind)),
                {"Δ, nats a token (right: worse)", false, {}, {}},
                {},
                {}};
  double row = 0;
  for (const Architecture& a : setting.architectures)
    for (const Comparison& c : a.comparisons) {
      if (c.kind != kind || !c.degradation.problem.empty()) continue;
      Series mean{a.name, a.style, {}, {}, {}, {}, false, 5.5}, domains{a.name, a.style, {}, {}, {}, {}, false, 3.5};
      const auto add = [&](Series& series, const stats::Interval& interval, const std::string& label) {
        series.x.push_back(interval.estimate), series.y.push_back(row);
        series.low.push_back(interval.low), series.high.push_back(interval.high);
        figure.y.ticks.emplace_back(row++, label);
      };
      add(mean, c.degradation.average, a.name);
      if (c.degradation.domains.size() > 1)
        for (const auto& [domain, interval] : c.degradation.domains) add(domains, interval, domain);
      figure.series.push_back(std::move(mean)), figure.series.push_back(std::move(domains));
      row += 0.6;
    }
  figure.y.range = {row - 0.1, -0.6};
  figure.vertical = 0;
  figure.x.least = kLeastDifference;
  figure.height = 110 + int(24 * row);
  return figure;
}

// What Δ is the mean of.
Figure difference(const Setting& setting, Kind kind) {
  Figure figure{id(setting, fmt::format("difference-{}", name(kind))),
                "difference to the reference",
                {axis_title(kind), false, {}, {}},
                {setting.mixed ? "held-out loss − reference's" : "loss out of domain − reference's", false, {}, {}}};
  for (const Architecture& a : setting.architectures)
    for (const Comparison& c : a.comparisons) {
      if (c.kind != kind || c.profile.empty()) continue;
      Series series{a.name, a.style, {}, {}, {}, {}};
      for (auto point = c.profile.rbegin(); point != c.profile.rend(); ++point)
        series.x.push_back(point->first), series.y.push_back(point->second);
      figure.series.push_back(std::move(series));
    }
  figure.horizontal = 0;
  figure.y.least = kLeastDifference;
  return figure;
}

Figure curve(const Setting& setting, const std::string& file, const std::string& title,
             double (*get)(const Evaluation&)) {
  Figure figure{id(setting, file), title, {"training tokens", false, {}, {}}, {"loss (nats)", false, {}, {}}, {}};
  figure.series = lines(
      setting, [](const Evaluation& e) { return e.tokens; }, get);
  double last = 0, bottom = INFINITY, top = -INFINITY;
  for (Series& series : figure.series) {
    series.marker = 0;
    for (size_t i = 0; i < series.x.size(); ++i) {
      last = std::max(last, series.x[i]), bottom = std::min(bottom, series.y[i]);
      if (i >= std::min(series.x.size() - 1, series.x.size() / 10)) top = std::max(top, series.y[i]);
    }
  }
  if (!(bottom < top)) return figure;
  figure.x.range = {0, last * 1.04};
  figure.y.range = {bottom - 0.05 * (top - bottom), top + 0.05 * (top - bottom)};
  return figure;
}

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / double(values.size());  // NaN for none
}

Figure entropy_by_layer(const Setting& setting) {
  Figure figure{id(setting, "attention-entropy-by-layer"), "at the end, mean over heads", {"layer"}, {"entropy"}};
  for (const Architecture& a : setting.architectures)
    for (const Run& run : a.runs) {
      Series series{a.name, a.style};
      const auto& layers = run.evaluations.back().attention_entropy;
      for (size_t i = 0; i < layers.size(); ++i)
        if (!layers[i].empty()) series.x.push_back(double(i)), series.y.push_back(mean(layers[i]));
      if (!series.x.empty()) figure.series.push_back(std::move(series));
    }
  return figure;
}

}  // namespace

FigureGroup scatter_plots(const Setting& setting, Kind kind) {
  FigureGroup group{
      setting.mixed ? "Held-out loss against training loss"
                    : fmt::format("Loss out of domain against {} loss", name(kind)),
      std::string("Training runs from the upper right to the lower left; ") +
          (kind == Kind::held_out ? "one line a seed, a point an evaluation, the last one larger. "
                                  : "a point an evaluation, no lines, as training loss is noisy from step to step. ") +
          "At equal pre-training loss, the higher line generalises worse. Dashed: the identity, loss there = loss "
          "here. "
          "The first figure is the vertical distance to the reference, mean over domains and seeds: Δ is its mean.",
      {}};
  if (setting.test.size() > 1) group.figures.push_back(scatter(setting, kind, ""));
  for (const std::string& domain : setting.test) group.figures.push_back(scatter(setting, kind, domain));
  if (Figure figure = difference(setting, kind); !figure.series.empty())
    group.figures.insert(group.figures.begin(), std::move(figure));
  return group;
}

FigureGroup forest_plots(const Setting& setting) {
  FigureGroup group{"Degradation",
                    "Points are estimates, bars 95 % intervals over seeds and test documents. The first row of each "
                    "architecture is the mean of the domains below it.",
                    {}};
  for (const Kind kind : setting.kinds)
    if (Figure figure = forest(setting, kind); !figure.series.empty()) group.figures.push_back(std::move(figure));
  return group;
}

FigureGroup training_curves(const Setting& setting) {
  FigureGroup group{"Training curves", "One line a seed. Training loss is the mean since the evaluation before.", {}};
  group.figures.push_back(
      curve(setting, "curve-training", "training loss", [](const Evaluation& e) { return e.training_loss; }));
  group.figures.push_back(curve(setting, "curve-held-out", "held-out loss of the training domains",
                                [](const Evaluation& e) { return e.held_out_loss; }));
  if (!setting.mixed)
    group.figures.push_back(curve(setting, "curve-out-of-domain", "loss out of domain, mean",
                                  [](const Evaluation& e) { return e.test_loss; }));
  return group;
}

FigureGroup entropy_plots(const Setting& setting) {
  FigureGroup group{"Attention entropy",
                    "Of the softmax weights of queries in the second half of held-out text, over ln of the positions "
                    "they see: 1 is all positions "
                    "alike, 0 is one of them. One line a seed; every layer and head at every evaluation: "
                    "tables/attention-entropy.csv.",
                    {}};
  Figure along{id(setting, "attention-entropy"), "mean over layers and heads", {"training tokens"}, {"entropy"}};
  along.series = lines(
      setting, [](const Evaluation& e) { return e.tokens; }, mean_attention_entropy);
  std::erase_if(along.series, [](const Series& series) { return series.x.empty(); });
  if (along.series.empty()) return group;
  group.figures.push_back(std::move(along));
  group.figures.push_back(entropy_by_layer(setting));
  return group;
}

}  // namespace assay::report
