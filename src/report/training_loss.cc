#include "report/training_loss.h"

#include <cmath>
#include <limits>

namespace assay::report {

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

}  // namespace assay::report
