#pragma once
// Results of tasks in the form that a run keeps (run/tasks.h).
#include "run/tasks.h"
#include "tasks/evaluate.h"

namespace assay::cli {

run::TaskResult result_of(const tasks::Task& task, const std::string& key,
                          const std::vector<tasks::Item>& items);
// Puts a result in the place of the earlier one with its name, or at the end.
void put_result(std::vector<run::TaskResult>& results, run::TaskResult result);

}  // namespace assay::cli
