#pragma once
// The training loss at the evaluations of a run, from the noisy lines of metrics.jsonl.
#include "run/metrics.h"

namespace assay::run {

// Least-squares line through the training lines between the steps `first` and `last`, read at
// `step`. A trailing mean would lag behind a loss that falls. Each line counts at the middle of
// its steps. One line gives its own loss; no line gives NaN.
double training_loss_at(const std::vector<TrainingLine>& lines, int64_t step, int64_t first,
                        int64_t last);

// By evaluation: the loss within one evaluation interval on either side, to 4 decimals, or that of
// the record. At the end only the interval before is left. NaN at step 0.
std::vector<double> training_losses(const Metrics& metrics);

}  // namespace assay::run
