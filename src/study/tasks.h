#pragma once
// The tasks of a plan. They are checked before anything is trained, and evaluated on the final
// weights of every run that answers the plan's question: one process per run, apart from the
// training, so that tasks may be added to a study whose runs are finished.
#include "study/runner.h"

namespace assay::study {

// Asks the program (`assay eval tasks --dry-run`) what the tasks need, and sets `tasks` of every
// setting. BadInput, in terms of the plan, when a task, its data or a model does not fit; nothing
// is run then. A task with inputs that a model cannot read whole is logged.
void ask_tasks(Plan& plan, const std::vector<Candidate>& candidates, const StudyOptions& options);

// Evaluates what the store does not hold with the same key, options.jobs runs at a time, and stores
// it. Only runs that are done and have the purpose "study" are evaluated. A run without its final
// weights, and a task that fails, are stored with the reason. A process that a signal ended goes on
// where it stopped, twice at most. Throws Interrupted after Ctrl-C, when every process has stored
// what it had answered.
std::vector<Failure> evaluate_tasks(const Plan& plan, const std::vector<PlannedRun>& runs,
                                    const StudyOptions& options, Store& store);

}  // namespace assay::study
