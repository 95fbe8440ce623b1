// The figures of the primary comparison.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "report/plots.h"
#include "report/table.h"
#include "stats/reference.h"

namespace assay::report {
namespace {

constexpr int kCurvePoints = 60;
constexpr double kForestRow = 24;

struct Point {
  double held_out = 0;
  double loss = 0;
};

Point point_of(const Run& run, const Setting& setting, const std::string& domain) {
  const double held_out = setting.mixed ? run.end.training_loss : run.end.held_out_loss;
  return {held_out, domain.empty() ? run.end.test_loss : run.end.test_losses.at(domain)};
}

// The ends of every run of an architecture, and a line through the means of its budgets.
void add_ends(Figure& figure, const Architecture& a, const Setting& setting,
              const std::string& domain) {
  Series path{.name = a.name, .style = a.style, .marker = 0};
  Series ends{.name = a.name, .style = a.style, .line = false, .marker = 4};
  for (const auto& [tokens, runs] : a.budgets) {
    Point mean;
    for (const Run& run : runs) {
      const Point point = point_of(run, setting, domain);
      mean.held_out += point.held_out / double(runs.size());
      mean.loss += point.loss / double(runs.size());
      ends.x.push_back(point.held_out);
      ends.y.push_back(point.loss);
      ends.tips.push_back(fmt::format("{}, {} tokens, seed {}: {} {:.3f}, {} {:.3f}", a.name,
                                      show(double(tokens), Format::tokens), run.seed,
                                      setting.pretraining_name(), point.held_out,
                                      setting.test_name(), point.loss));
    }
    path.x.push_back(mean.held_out);
    path.y.push_back(mean.loss);
  }
  if (a.style != 0) figure.series.push_back(std::move(path));
  figure.series.push_back(std::move(ends));
}

Series curve_of(const Setting& setting, const std::string& domain) {
  Series curve{.name = setting.reference().name, .style = 0, .marker = 0};
  const auto ladder = only_domain(setting.ladder.budgets, domain);
  double low = INFINITY;
  double high = -INFINITY;
  for (const stats::Budget& budget : ladder)
    for (const stats::End& end : budget.runs) {
      low = std::min(low, end.held_out);
      high = std::max(high, end.held_out);
    }
  for (int i = 0; i <= kCurvePoints; ++i) {
    const double held_out = low + (high - low) * double(i) / kCurvePoints;
    const double loss = stats::ladder_loss(ladder, held_out);
    if (!std::isfinite(loss)) continue;
    curve.x.push_back(held_out);
    curve.y.push_back(loss);
  }
  return curve;
}

// The identity line crosses a figure only where out-of-domain text is as easy as held-out text.
// The axes do not stretch to it: they show the data.
Figure ladder_figure(const Setting& setting, const std::string& domain) {
  Figure figure{
      .id = figure_id(setting, "ladder-" + (domain.empty() ? std::string("mean") : domain)),
      .title = domain.empty() ? fmt::format("{} against {} at the end of training",
                                            setting.mixed ? "Held-out loss" : "Loss out of domain",
                                            setting.pretraining_name())
                              : domain,
      .x = {.title = std::string(setting.pretraining_name()) + ", nats per token"},
      .y = {.title = std::string(setting.test_name()) + ", nats per token"},
      .identity = true};
  if (domain.empty()) {
    figure.width = 720;
    figure.height = 430;
  }
  if (setting.has_reference() && setting.ladder.budgets.size() > 1)
    if (Series curve = curve_of(setting, domain); !curve.x.empty())
      figure.series.push_back(std::move(curve));
  for (const Architecture& a : setting.architectures) add_ends(figure, a, setting, domain);
  return figure;
}

struct ForestRow {
  std::string label;
  stats::Interval interval;
  bool main = false;
};

// Rows from the top: an architecture with its main row, then its parts, then the next one.
void add_rows(Figure& figure, double& row, const Architecture& a,
              const std::vector<ForestRow>& rows) {
  Series main{.name = a.name, .style = a.style, .line = false, .marker = 5.5};
  Series parts{.name = a.name, .style = a.style, .line = false, .marker = 3.5};
  for (const ForestRow& one : rows) {
    Series& series = one.main ? main : parts;
    series.x.push_back(one.interval.estimate);
    series.y.push_back(row);
    series.low.push_back(one.interval.low);
    series.high.push_back(one.interval.high);
    series.tips.push_back(
        fmt::format("{}, {}: {}", a.name, one.label, show(one.interval, Format::change)));
    figure.y.ticks.emplace_back(row, one.main ? one.label + "\t" : one.label);
    row += 1;
  }
  figure.series.push_back(std::move(main));
  figure.series.push_back(std::move(parts));
  row += 0.6;
}

Figure forest(const Setting& setting, const std::string& id, const std::string& title) {
  return {.id = figure_id(setting, id),
          .title = title,
          .x = {.title = "Δ_end, nats per token (right: worse)"},
          .vertical = 0,
          .band = setting.ladder.options.margin,
          .width = 620};
}

void finish(FigureGroup& group, Figure figure, double rows) {
  if (figure.series.empty()) return;
  figure.y.range = {rows - 0.1, -0.6};
  figure.height = 110 + int(kForestRow * rows);
  group.figures.push_back(std::move(figure));
}

}  // namespace

std::string figure_id(const Setting& setting, const std::string& name) {
  return setting.name.empty() ? name : setting.name + "-" + name;
}

FigureGroup ladder_plot(const Setting& setting) {
  std::string note = fmt::format(
      "Each symbol is the end of one run. "
      "The black curve shows what the reference has at each {}, interpolated between its budgets. "
      "Δ_end is the vertical distance to the curve; above it is worse.",
      setting.pretraining_name());
  if (std::ranges::any_of(setting.architectures,
                          [](const Architecture& a) { return a.style && a.budgets.size() > 1; }))
    note += " Thin lines join the means of the budgets of an architecture.";
  return {.title = "The ends of runs against the ladder of the reference",
          .note = note,
          .figures = {ladder_figure(setting, "")},
          .large = true};
}

FigureGroup ladder_plots_by_domain(const Setting& setting) {
  FigureGroup group{.title = "The same by domain",
                    .note = "Symbols, curve and lines are those of the figure above."};
  if (setting.test.size() < 2) return group;
  for (const std::string& domain : setting.test)
    group.figures.push_back(ladder_figure(setting, domain));
  return group;
}

FigureGroup domain_forest(const Setting& setting) {
  FigureGroup group{.title = "Δ_end by domain, as a figure",
                    .note =
                        "Bars are 95 % intervals: simultaneous for the mean, "
                        "individual for a domain. The shaded band is the margin.",
                    .large = true};
  Figure figure = forest(setting, "delta-by-domain", "Δ_end by domain");
  double row = 0;
  for (const Architecture& a : setting.architectures) {
    if (a.style == 0 || !a.end.judged) continue;
    std::vector<ForestRow> rows = {{a.name, a.end.delta, true}};
    if (a.end.domains.size() > 1)
      for (const auto& [domain, interval] : a.end.domains) rows.push_back({domain, interval});
    add_rows(figure, row, a, rows);
  }
  finish(group, std::move(figure), row);
  return group;
}

FigureGroup recall_forest(const Setting& setting) {
  FigureGroup group{.title = "Recall targets and other targets, as a figure",
                    .note =
                        "The two parts of an architecture add up to its Δ_end. "
                        "Bars are individual 95 % intervals.",
                    .large = true};
  Figure figure = forest(setting, "delta-by-recall", "Parts of Δ_end");
  double row = 0;
  for (const Architecture& a : setting.architectures) {
    if (a.style == 0 || !a.end.judged || !std::isfinite(a.end.recall_part.estimate)) continue;
    add_rows(figure, row, a,
             {{a.name, a.end.delta_single, true},
              {"recall targets", a.end.recall_part},
              {"other targets", a.end.other_part}});
  }
  finish(group, std::move(figure), row);
  return group;
}

FigureGroup budget_plots(const Setting& setting) {
  FigureGroup group{.title = "Δ_end by budget, as a figure",
                    .note =
                        "Bars are individual 95 % intervals. The shaded band is the margin. "
                        "A point whose row in the table above names a problem has no verdict. "
                        "Points of one budget are drawn side by side. "
                        "Architectures with one point are left out."};
  Figure figure{.id = figure_id(setting, "delta-by-budget"),
                .title = "Δ_end over the budget",
                .x = {.title = "training tokens", .log = true},
                .y = {.title = "Δ_end, nats per token (up: worse)"},
                .horizontal = 0,
                .band = setting.ladder.options.margin,
                .width = 620};
  const auto has_point = [](const stats::BudgetResult& budget) { return budget.problem.empty(); };
  std::vector<const Architecture*> drawn;
  for (const Architecture& a : setting.architectures)
    if (std::ranges::count_if(a.end.budgets, has_point) > 1) drawn.push_back(&a);
  for (size_t i = 0; i < drawn.size(); ++i) {
    const Architecture& a = *drawn[i];
    // A little to the side, so that error bars do not cover each other.
    const double shift = std::exp2(0.04 * (double(i) - double(drawn.size() - 1) / 2));
    Series series{.name = a.name, .style = a.style, .marker = 4.5, .upright = true};
    for (const stats::BudgetResult& budget : a.end.budgets) {
      if (!has_point(budget)) continue;
      series.x.push_back(budget.tokens * shift);
      series.y.push_back(budget.delta.estimate);
      series.low.push_back(budget.delta.low);
      series.high.push_back(budget.delta.high);
      series.tips.push_back(fmt::format("{}, {} tokens: {}", a.name,
                                        show(budget.tokens, Format::tokens),
                                        show(budget.delta, Format::change)));
      const std::string tick = show(budget.tokens, Format::tokens);
      const bool known = std::ranges::any_of(
          figure.x.ticks, [&](const auto& entry) { return entry.second == tick; });
      if (!known) figure.x.ticks.emplace_back(budget.tokens, tick);
    }
    figure.series.push_back(std::move(series));
  }
  if (!figure.series.empty()) group.figures.push_back(std::move(figure));
  return group;
}

FigureGroup tuning_plots(const Setting& setting) {
  FigureGroup group{.title = "Held-out loss over the learning rate",
                    .note = "The chosen rate has a filled symbol. The other rates have outlines."};
  Figure figure{.id = figure_id(setting, "learning-rates"),
                .title = "Choice of the learning rate",
                .x = {.title = "peak learning rate", .log = true},
                .y = {.title = "held-out loss, nats per token"},
                .width = 620};
  for (const Grid& grid : setting.grids) {
    const auto a = std::ranges::find(setting.architectures, grid.model, &Architecture::name);
    if (a == setting.architectures.end()) continue;
    Series line{.name = grid.model, .style = a->style, .marker = 0};
    Series open{
        .name = grid.model, .style = a->style, .line = false, .marker = 4.5, .hollow = true};
    Series chosen{.name = grid.model, .style = a->style, .line = false, .marker = 5.5};
    for (const Grid::Point& point : grid.points) {
      if (!std::isfinite(point.held_out_loss)) continue;
      const std::string tick = fmt::format("{:g}", point.learning_rate);
      const bool known = std::ranges::any_of(
          figure.x.ticks, [&](const auto& entry) { return entry.second == tick; });
      if (!known) figure.x.ticks.emplace_back(point.learning_rate, tick);
      line.x.push_back(point.learning_rate);
      line.y.push_back(point.held_out_loss);
      Series& to = point.chosen ? chosen : open;
      to.x.push_back(point.learning_rate);
      to.y.push_back(point.held_out_loss);
      to.tips.push_back(fmt::format("{} at {:g}: {:.3f}{}", grid.model, point.learning_rate,
                                    point.held_out_loss, point.chosen ? ", chosen" : ""));
    }
    if (line.x.empty()) continue;
    for (Series* series : {&line, &chosen, &open}) figure.series.push_back(std::move(*series));
  }
  if (!figure.series.empty()) group.figures.push_back(std::move(figure));
  return group;
}

}  // namespace assay::report
