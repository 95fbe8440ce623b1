#include "report/tuning.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "report/analysis.h"

namespace assay::report {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

double held_out_loss(const study::StudyRun& row, const Setting& setting) {
  double sum = 0;
  const auto& sets = row.finished->end.sets;
  for (const std::string& domain : setting.train) {
    const auto found = sets.find(domain + "." + setting.held_out);
    sum += found == sets.end() ? kNone : found->second.loss;
  }
  return sum / double(setting.train.size());
}

bool same_rate(double a, double b) { return std::abs(a - b) <= 1e-9 * std::max(a, b); }

Grid grid_of(const std::string& model, const Setting& setting,
             const std::vector<study::StudyRun>& rows) {
  Grid grid{.model = model};
  double used = 0;
  std::map<double, std::vector<const study::StudyRun*>> by_rate;
  for (const study::StudyRun& row : rows) {
    if (row.model != model) continue;
    if (row.purpose == study::purpose::kStudy) used = row.learning_rate;
    if (row.purpose != study::purpose::kTuning) continue;
    grid.tokens = row.tokens;
    by_rate[row.learning_rate].push_back(&row);
  }
  for (const auto& [rate, found] : by_rate) {
    Grid::Point point{.learning_rate = rate, .planned = int64_t(found.size())};
    double sum = 0;
    for (const study::StudyRun* row : found) {
      if (!row->finished) continue;
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

std::vector<Grid> grids(const Setting& setting, const std::vector<study::StudyRun>& rows) {
  std::vector<std::string> models;
  for (const study::StudyRun& row : rows) {
    const std::string model = row.model;
    if (row.purpose == study::purpose::kTuning && !std::ranges::count(models, model))
      models.push_back(model);
  }
  std::vector<Grid> out;
  for (const std::string& model : models) out.push_back(grid_of(model, setting, rows));
  return out;
}

}  // namespace assay::report
