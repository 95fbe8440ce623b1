#pragma once
// The training loss at one step, from the noisy lines of metrics.jsonl.
#include <cstdint>
#include <vector>

namespace assay::report {

// A line of metrics.jsonl: the mean loss over the steps after the line before, up to `step`.
struct TrainingLine {
  int64_t step = 0;
  double loss = 0;
};

// Least-squares line through the training lines between the steps `first` and `last`, read at
// `step`. A trailing mean would lag behind a loss that falls. Each line counts at the middle of
// its steps. One line gives its own loss; no line gives NaN.
double training_loss_at(const std::vector<TrainingLine>& lines, int64_t step, int64_t first,
                        int64_t last);

}  // namespace assay::report
