#pragma once
// One run: a model, a store, a folder. Bit for bit the same however often it is interrupted,
// killed and resumed.
#include <string>

#include "base/files.h"
#include "run/records.h"
#include "train/ranks.h"
#include "train/run_config.h"

namespace assay::train {

struct TrainOptions {
  fs::path store;
  fs::path run;
  std::string device = "auto";
  bool resume = false;
  Ranks* ranks = nullptr;  // null: this process trains alone
};
// Trains to the end and writes the run folder (docs/runs.md). Throws Interrupted
// (saved), Error (diverged, out of memory, disk full) with the last good checkpoint,
// BadInput with nothing changed. With ranks, all of them call it with the same arguments, and only
// rank 0 writes the folder.
run::Outcome train(const RunConfig& config, const TrainOptions& options);
// From building the model on the device and the fastest of a few steps, or parts of steps where one
// would take long.
run::Estimate describe_run(const RunConfig& config, const TrainOptions& options);

}  // namespace assay::train
