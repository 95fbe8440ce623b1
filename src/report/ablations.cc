// Figures over one hyper-parameter at a time: a line joins the models that differ in it alone.
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <map>
#include <optional>
#include <set>

#include "base/error.h"
#include "report/plots.h"

namespace assay::report {
namespace {

constexpr double kLeastDifference = 0.04;  // nats

using Models = std::vector<const Architecture*>;

// Hyper-parameters of the model itself. Those of training do not count: every model has a tuned
// learning rate of its own.
Hyperparameters of_model(const Architecture& a) {
  Hyperparameters all = hyperparameters(a);
  std::erase_if(all, [](const auto& pair) { return !pair.first.starts_with("model."); });
  return all;
}

// Models that agree in everything but `name`, where their values differ.
std::vector<Models> families(const Setting& setting, const std::string& name) {
  std::map<Hyperparameters, std::pair<Models, std::set<std::string>>> found;
  for (const Architecture& a : setting.architectures) {
    Hyperparameters rest = of_model(a);
    const auto own = std::ranges::find(rest, name, [](const auto& pair) { return pair.first; });
    if (own == rest.end()) continue;
    const std::string value = own->second;
    rest.erase(own);
    auto& [models, values] = found[rest];
    models.push_back(&a);
    values.insert(value);
  }
  std::vector<Models> out;
  for (const auto& [rest, family] : found)
    if (family.second.size() > 1) out.push_back(family.first);
  return out;
}

std::string value_of(const Architecture& a, const std::string& name) {
  for (auto& [key, value] : of_model(a)) {
    if (key != name) continue;
    std::erase(value, '"');
    return value;
  }
  return "";
}

std::optional<double> number(const std::string& text) {
  double value;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(value)
                                                                  : std::nullopt;
}

// The position of each value: numbers by their logarithm, 0 (none) before the first, a number below
// 0 (all) after the last; words in the order of the models.
std::map<std::string, double> places(const std::vector<std::string>& values) {
  std::map<std::string, double> out;
  const bool numbers =
      std::ranges::all_of(values, [](const auto& text) { return number(text).has_value(); });
  double low = INFINITY;
  double high = -INFINITY;
  for (const std::string& text : values)
    if (const auto value = number(text); value && *value > 0) {
      low = std::min(low, std::log2(*value));
      high = std::max(high, std::log2(*value));
    }
  for (const std::string& text : values) {
    const auto value = number(text);
    if (!numbers) out.emplace(text, double(out.size()));
    else if (low > high) out[text] = *value;
    else out[text] = *value > 0 ? std::log2(*value) : *value == 0 ? low - 1 : high + 1;
  }
  return out;
}

// [value, low, high] of a model, or none.
using Reading = std::optional<std::array<double, 3>>;

Reading delta(const Architecture& a) {
  if (a.style == 0) return {{0, 0, 0}};
  if (!a.end.judged) return {};
  return {{a.end.delta.estimate, a.end.delta.low, a.end.delta.high}};
}

// The bar is the range of the seeds.
Reading entropy(const Architecture& a) {
  double low = INFINITY;
  double high = -INFINITY;
  const auto of = [](const Run& run) { return run.evaluations.back().mean_attention_entropy; };
  for (const Run& run : a.runs()) {
    low = std::min(low, of(run));
    high = std::max(high, of(run));
  }
  const double mean = mean_over(a.runs(), of);
  return std::isfinite(mean) ? Reading{{mean, low, high}} : Reading{};
}

template <class Read>
void draw(Figure& figure, Models family, const std::string& name, Read&& read) {
  std::map<std::string, double> place;
  for (const auto& [at, text] : figure.x.ticks) place[text == "all" ? "-1" : text] = at;
  std::ranges::sort(family, {}, [&](const Architecture* a) {
    return std::pair(place.at(value_of(*a, name)), a->style);
  });
  Series line{.name = family.front()->name, .style = family.front()->style, .marker = 0};
  std::vector<Series> points;
  for (const Architecture* a : family) {
    const Reading reading = read(*a);
    if (!reading) continue;
    const auto [value, low, high] = *reading;
    const double x = place.at(value_of(*a, name));
    if (const auto size = number(value_of(*a, name)); !size || *size > 0) {
      line.x.push_back(x);
      line.y.push_back(value);
    }
    points.push_back({.name = a->name,
                      .style = a->style,
                      .x = {x},
                      .y = {value},
                      .low = {low},
                      .high = {high},
                      .line = false,
                      .marker = 5,
                      .upright = true});
  }
  if (points.size() < 2) return;
  figure.series.push_back(std::move(line));
  for (Series& point : points) figure.series.push_back(std::move(point));
}

// A window of -1 is no window.
std::string shown_value(const std::string& text) { return text == "-1" ? "all" : text; }

void add_figures(FigureGroup& group, const Setting& setting, const std::string& name) {
  const std::vector<Models> all = families(setting, name);
  if (all.empty()) return;
  std::vector<std::string> values;
  for (const Models& family : all)
    for (const Architecture* a : family) values.push_back(value_of(*a, name));
  const std::string shown = name.substr(std::string("model.").size());
  const std::string file = figure_id(setting, "over-" + shown);
  Axis x{.title = shown};
  double first = INFINITY;
  double last = -INFINITY;
  for (const auto& [text, at] : places(values)) {
    x.ticks.emplace_back(at, shown_value(text));
    first = std::min(first, at);
    last = std::max(last, at);
  }
  x.range = {first - 0.4, last + 0.4};  // room for the outer labels
  Figure difference{.id = file,
                    .title = "Δ_end over " + shown,
                    .x = x,
                    .y = {.title = "Δ_end, nats per token (up: worse)", .least = kLeastDifference},
                    .horizontal = 0,
                    .band = setting.ladder.options.margin};
  Figure sharpness{.id = file + "-entropy",
                   .title = "Attention entropy over " + shown,
                   .x = x,
                   .y = {.title = "attention entropy at the end"}};
  for (const Models& family : all) {
    draw(difference, family, name, delta);
    draw(sharpness, family, name, entropy);
  }
  for (Figure* figure : {&difference, &sharpness})
    if (!figure->series.empty()) group.figures.push_back(std::move(*figure));
}

}  // namespace

FigureGroup ablation_plots(const Setting& setting) {
  FigureGroup group{
      .title = "One hyper-parameter at a time",
      .note =
          "A line joins models that differ in no other hyper-parameter of the model. "
          "If learning rates are tuned, they may differ. "
          "Bars of Δ_end are simultaneous 95 % intervals, and 0 is the reference. "
          "Bars of the entropy are the range of the seeds. "
          "An axis of numbers is logarithmic, with 0 (none) and −1 (all positions) at its ends."};
  std::vector<std::string> names;
  for (const Architecture& a : setting.architectures)
    for (const auto& [name, value] : of_model(a))
      if (!std::ranges::count(names, name)) names.push_back(name);
  for (const std::string& name : names) add_figures(group, setting, name);
  return group;
}

}  // namespace assay::report
