#include "run/training_loss.h"

#include <cmath>
#include <limits>

namespace assay::run {

double training_loss_at(const std::vector<TrainingLine>& lines, int64_t step, int64_t first,
                        int64_t last) {
  double count = 0;
  double sum_x = 0;
  double sum_y = 0;
  double sum_xx = 0;
  double sum_xy = 0;
  int64_t before = 0;
  for (const TrainingLine& line : lines) {
    const double middle = double(before + 1 + line.step) / 2;
    before = line.step;
    if (line.step <= first || line.step > last || !std::isfinite(line.loss)) continue;
    const double x = middle - double(step);
    count += 1;
    sum_x += x;
    sum_y += line.loss;
    sum_xx += x * x;
    sum_xy += x * line.loss;
  }
  if (count == 0) return std::numeric_limits<double>::quiet_NaN();
  const double spread = count * sum_xx - sum_x * sum_x;
  if (spread <= 1e-9 * count * sum_xx) return sum_y / count;
  return (sum_xx * sum_y - sum_x * sum_xy) / spread;
}

std::vector<double> training_losses(const Metrics& metrics) {
  std::vector<double> out;
  int64_t before = 0;
  for (const EvaluationLine& line : metrics.evaluations) {
    const size_t next = out.size() + 1;
    const bool last = next == metrics.evaluations.size();
    const int64_t after = last ? line.step : metrics.evaluations[next].step;
    double loss = std::numeric_limits<double>::quiet_NaN();
    if (line.smooth_training_loss) loss = *line.smooth_training_loss;
    else if (line.step > 0) loss = training_loss_at(metrics.training, line.step, before, after);
    out.push_back(std::round(1e4 * loss) / 1e4);
    before = line.step;
  }
  return out;
}

}  // namespace assay::run
