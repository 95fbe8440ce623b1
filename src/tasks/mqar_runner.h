#pragma once
// The runs of an MQAR plan as processes of this machine.
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "study/prepare.h"
#include "study/runner.h"
#include "tasks/mqar.h"

namespace assay::tasks {

struct MqarOutcome {
  std::map<size_t, nlohmann::json> results;  // by place in MqarStudy::runs
  std::vector<study::Failure> failures;
  bool interrupted = false;  // the processes were asked to end
};
// Trains the runs whose results are not in mqar.sqlite of the folder options.study, options.jobs at
// a time. The caller holds the lock of the folder.
//   process   `assay eval mqar PLAN -o FOLDER --run N` prints the result of run N, and its log is
//             logs/KEY.log. Only this process writes to the database.
//   order     the learning rates of one model, width and length are tried in order until
//             one reaches stop_at
//   failure   the other runs go on, and the next call tries the run again
// After Ctrl-C it waits for the processes and returns what is done.
MqarOutcome run_mqar(const MqarStudy& study, const study::StudyOptions& options);

}  // namespace assay::tasks
