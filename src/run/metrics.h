#pragma once
// metrics.jsonl: a line per interval of training and a line per evaluation, in order of the step.
#include <cstdio>
#include <optional>
#include <vector>

#include "run/folder.h"

namespace assay::run {

struct Metrics {
  std::vector<TrainingLine> training;
  std::vector<EvaluationLine> evaluations;
};
// BadInput names file, line and key.
Metrics read_metrics(const Folder& folder);

// Attention entropy of an evaluation: mean over the layers and heads that have softmax weights, NaN
// without.
double mean_entropy_of(const EvaluationLine& line);

// The newest lines of a run that may still be writing. Broken lines are passed over.
struct Newest {
  std::optional<TrainingLine> training;
  std::optional<double> held_out_loss;  // of the last evaluation that has one
};
Newest newest_metrics(const Folder& folder);

// Appends lines. Lines after `step`, which a resumed run repeats, are dropped.
class MetricsWriter {
 public:
  MetricsWriter(const Folder& folder, int64_t step);
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  void write(const TrainingLine& line) { write_line(to_json(line).dump()); }
  void write(const EvaluationLine& line) { write_line(to_json(line).dump()); }
  // The step of the last training line that was kept; 0 for none.
  int64_t last_step() const { return last_step_; }
  // Writes the lines to the disk: a checkpoint must not outlive those before it.
  void sync();

 private:
  void write_line(const std::string& text);
  fs::path path_;
  int64_t last_step_ = 0;
  std::FILE* file_;
};

// The last `bytes` of a file; "" when it cannot be read.
std::string tail(const fs::path& file, int64_t bytes);

}  // namespace assay::run
