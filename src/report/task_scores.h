#pragma once
// Scores of the tasks of a study by architecture, and whether Δ_end goes with them.
#include <optional>
#include <string>
#include <vector>

#include "stats/scores.h"

namespace assay::report {

struct Run;
struct Setting;

// Score of one architecture at one budget: the largest at which the reference was evaluated, too,
// or else the largest that was evaluated.
struct Score {
  int64_t tokens = 0;
  int64_t seeds = 0;
  int64_t items = 0;
  stats::Interval value{};       // on the scale of the metric
  stats::Interval difference{};  // to the reference at the same budget, paired by item; of
                                 // perplexities, of their logarithms. NaN where there is none
};
// One metric of a task, or the mean over several tasks of their shares of right items.
struct TaskScores {
  std::string name;
  std::string metric;
  bool recall = false;                       // the answers are in the prompts
  std::vector<std::optional<Score>> scores;  // in the order of the architectures
};
std::vector<TaskScores> task_scores(const Setting& setting);

// Δ_end and a score of every architecture but the reference that has both at one budget: the
// budget that most of them have.
struct Agreement {
  struct Point {
    std::string model;
    int style = 0;
    stats::Interval delta{};  // of this budget alone
    stats::Interval score{};
  };
  std::string name;
  bool recall = false;
  int64_t tokens = 0;  // 0: no architecture has both
  std::vector<Point> points;
  std::optional<stats::Interval> reference;  // its score at this budget
  stats::Interval tau{};                     // Kendall's; NaN for too few points
  std::string caveat;                        // of Δ_end at this budget
  std::string text() const;                  // in a sentence, with the number of architectures
};
// The means over recall tasks and over other tasks, and each recall task.
std::vector<Agreement> task_agreements(const Setting& setting);

// One finished run: a metric of a task, or why the task has no result.
struct RunTask {
  std::string task;
  std::string metric;
  double value = 0;
  int64_t items = 0;
  int64_t truncated = 0;
  std::string problem;
};
std::vector<RunTask> run_tasks(const Setting& setting, const Run& run);
// The problems of all runs, in one sentence per reason.
std::vector<std::string> task_cautions(const Setting& setting);

}  // namespace assay::report
