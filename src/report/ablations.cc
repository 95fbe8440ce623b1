// Figures over one hyper-parameter at a time: models that differ in it alone stand on one line.
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

// Models that agree in everything but `name`, where their values differ.
std::vector<Models> families(const Setting& setting, const std::string& name) {
  std::map<Hyperparameters, std::pair<Models, std::set<std::string>>> found;
  for (const Architecture& a : setting.architectures) {
    Hyperparameters rest = hyperparameters(a);
    const auto own = std::ranges::find(rest, name, [](const auto& pair) { return pair.first; });
    if (own == rest.end()) continue;
    const std::string value = own->second;
    rest.erase(own);
    auto& [models, values] = found[rest];
    models.push_back(&a), values.insert(value);
  }
  std::vector<Models> out;
  for (const auto& [rest, family] : found)
    if (family.second.size() > 1) out.push_back(family.first);
  return out;
}

std::string value_of(const Architecture& a, const std::string& name) {
  for (auto& [key, value] : hyperparameters(a))
    if (key == name) return std::erase(value, '"'), value;
  return "";
}

std::optional<double> number(const std::string& text) {
  double value;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(value) : std::nullopt;
}

// Where each value stands: numbers by their logarithm, 0 (none) one before the first, a number below 0 (all) one behind
// the last; words in the order of the models.
std::map<std::string, double> places(const std::vector<std::string>& values) {
  std::map<std::string, double> out;
  const bool numbers = std::ranges::all_of(values, [](const auto& text) { return number(text).has_value(); });
  double low = INFINITY, high = -INFINITY;
  for (const std::string& text : values)
    if (const auto value = number(text); value && *value > 0)
      low = std::min(low, std::log2(*value)), high = std::max(high, std::log2(*value));
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

Reading delta(const Architecture& a, const Setting& setting) {
  if (a.style == 0) return {{0, 0, 0}};
  for (const Comparison& c : a.comparisons)
    if (c.kind == setting.kinds.front() && c.degradation.problem.empty()) {
      const stats::Interval& mean = c.degradation.average;
      return {{mean.estimate, mean.low, mean.high}};
    }
  return {};
}

// The bar is the range of the seeds.
Reading entropy(const Architecture& a) {
  double low = INFINITY, high = -INFINITY;
  const auto of = [](const Run& run) { return mean_attention_entropy(run.evaluations.back()); };
  for (const Run& run : a.runs) low = std::min(low, of(run)), high = std::max(high, of(run));
  const double mean = mean_over(a.runs, of);
  return std::isfinite(mean) ? Reading{{mean, low, high}} : Reading{};
}

template <class Read>
void draw(Figure& figure, Models family, const std::string& name, Read&& read) {
  std::map<std::string, double> place;
  for (const auto& [at, text] : figure.x.ticks) place[text] = at;
  std::ranges::sort(family, {},
                    [&](const Architecture* a) { return std::pair(place.at(value_of(*a, name)), a->style); });
  Series line{family.front()->name, family.front()->style, {}, {}, {}, {}, true, 0};
  std::vector<Series> points;
  for (const Architecture* a : family)
    if (const Reading reading = read(*a)) {
      const auto [value, low, high] = *reading;
      const double x = place.at(value_of(*a, name));
      if (const auto size = number(value_of(*a, name)); !size || *size > 0)
        line.x.push_back(x), line.y.push_back(value);
      points.push_back({a->name, a->style, {x}, {value}, {low}, {high}, false, 5, true});
    }
  if (points.size() < 2) return;
  figure.series.push_back(std::move(line));
  for (Series& point : points) figure.series.push_back(std::move(point));
}

void add_figures(FigureGroup& group, const Setting& setting, const std::string& name) {
  const std::vector<Models> all = families(setting, name);
  if (all.empty()) return;
  std::vector<std::string> values;
  for (const Models& family : all)
    for (const Architecture* a : family) values.push_back(value_of(*a, name));
  const std::string shown = name.substr(std::string("model.").size());
  const std::string file = (setting.name.empty() ? "" : setting.name + "-") + "over-" + shown;
  Axis x{shown};
  double first = INFINITY, last = -INFINITY;
  for (const auto& [text, at] : places(values)) {
    x.ticks.emplace_back(at, text);
    first = std::min(first, at), last = std::max(last, at);
  }
  x.range = {first - 0.4, last + 0.4};  // room for the outer labels
  Figure difference{file, "Δ over " + shown, x, {"Δ, nats a token (up: worse)"}};
  difference.horizontal = 0, difference.y.least = kLeastDifference;
  Figure sharpness{file + "-entropy", "entropy over " + shown, x, {"attention entropy at the end"}};
  for (const Models& family : all) {
    draw(difference, family, name, [&](const Architecture& a) { return delta(a, setting); });
    draw(sharpness, family, name, entropy);
  }
  for (Figure* figure : {&difference, &sharpness})
    if (!figure->series.empty()) group.figures.push_back(std::move(*figure));
}

}  // namespace

FigureGroup ablation_plots(const Setting& setting) {
  FigureGroup group{"One hyper-parameter at a time",
                    "Models that differ in nothing else are joined. Of Δ (at equal loss of the kind that answers) the "
                    "bars are 95 % intervals, and 0 is the "
                    "reference; of the entropy they are the range of the seeds. Numbers stand by their logarithm; 0 "
                    "before and −1 behind them mean something else (none, all, learned) and stand apart.",
                    {}};
  std::vector<std::string> names;
  for (const Architecture& a : setting.architectures)
    for (const auto& [name, value] : hyperparameters(a))
      if (name.starts_with("model.") && !std::ranges::count(names, name)) names.push_back(name);
  for (const std::string& name : names) add_figures(group, setting, name);
  return group;
}

}  // namespace assay::report
