#pragma once
// The learning rates that were tried, by model: the rate with the lowest held-out loss is used.
#include <string>
#include <vector>

#include "study/store.h"

namespace assay::report {

struct Setting;

struct Grid {
  struct Point {
    double learning_rate = 0;
    double held_out_loss = 0;  // mean over the seeds; NaN unless every run ended
    int64_t done = 0;
    int64_t planned = 0;
    bool chosen = false;
  };
  std::string model;
  int64_t tokens = 0;         // the budget of the runs of the grid
  std::vector<Point> points;  // in order of the learning rate
  // The chosen rate is the smallest or the largest of those tried, so a better one may lie beyond.
  bool at_the_end() const;
};

// `rows` are the planned runs of the setting. Runs of the study that a grid shares count for it.
std::vector<Grid> grids(const Setting& setting, const std::vector<study::StudyRun>& rows);

}  // namespace assay::report
