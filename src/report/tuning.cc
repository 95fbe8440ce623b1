#include "report/tuning.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "report/analysis.h"
#include "study/store.h"

namespace assay::report {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

double held_out_loss(const Json& row, const Setting& setting) {
  double sum = 0;
  const Json sets = row["end_losses"].value("sets", Json::object());
  for (const std::string& domain : setting.train)
    sum += number(sets.value(domain + "." + setting.held_out, Json::object()), "loss");
  return sum / double(setting.train.size());
}

bool same_rate(double a, double b) { return std::abs(a - b) <= 1e-9 * std::max(a, b); }

Grid grid_of(const std::string& model, const Setting& setting, const std::vector<Json>& rows) {
  Grid grid{.model = model};
  double used = 0;
  std::map<double, std::vector<const Json*>> by_rate;
  for (const Json& row : rows) {
    if (row["model"] != model) continue;
    if (row["purpose"] == study::purpose::kStudy) used = row["learning_rate"];
    if (row["purpose"] != study::purpose::kTuning) continue;
    grid.tokens = row["tokens"];
    by_rate[row["learning_rate"]].push_back(&row);
  }
  for (const auto& [rate, found] : by_rate) {
    Grid::Point point{.learning_rate = rate, .planned = int64_t(found.size())};
    double sum = 0;
    for (const Json* row : found) {
      if ((*row)["status"] != "done") continue;
      ++point.done;
      sum += held_out_loss(*row, setting);
    }
    point.held_out_loss = point.done == point.planned ? sum / double(point.done) : kNone;
    point.chosen = same_rate(rate, used);
    grid.points.push_back(point);
  }
  return grid;
}

}  // namespace

bool Grid::at_the_end() const {
  return points.size() > 1 && (points.front().chosen || points.back().chosen);
}

std::vector<Grid> grids(const Setting& setting, const std::vector<Json>& rows) {
  std::vector<std::string> models;
  for (const Json& row : rows) {
    const std::string model = row["model"];
    if (row["purpose"] == study::purpose::kTuning && !std::ranges::count(models, model))
      models.push_back(model);
  }
  std::vector<Grid> out;
  for (const std::string& model : models) out.push_back(grid_of(model, setting, rows));
  return out;
}

}  // namespace assay::report
