#pragma once
// One run: a model, a store, a folder. Bit for bit the same however often it is interrupted,
// killed and resumed.
#include <string>
#include <vector>

#include "base/files.h"
#include "nn/language_model.h"
#include "run/records.h"
#include "train/config.h"
#include "train/ranks.h"

namespace assay::train {

// The [model] and [train] of a run, complete: every default that the data decides is filled in.
struct RunConfig {
  nn::ModelSpec model;
  TrainConfig train;
  std::string toml() const;  // config.toml of the run
  // The same without seed, budget and learning rate, and without what only decides how often
  // something is written. Runs with equal identities differ in nothing else.
  std::string identity() const;
};
// BadInput with place and nearest name. `ranks`: the number of processes that will train.
RunConfig read_run_config(const ConfigNode& file, const fs::path& store, int64_t ranks = 1);

struct TrainOptions {
  fs::path store, run;
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
