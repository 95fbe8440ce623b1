#pragma once
// The configuration of a run: its model and its training, with every default filled in.
#include <string>

#include "base/config.h"
#include "base/files.h"
#include "nn/language_model.h"
#include "run/records.h"
#include "train/config.h"

namespace assay::train {

// The [model] and [train] of a run, complete: every default that the data decides is filled in.
struct RunConfig {
  nn::ModelSpec model;
  TrainConfig train;
  std::string toml() const;  // config.toml of the run
  // The values that are not the defaults and the numerics versions above 1, without seed, budget
  // and learning rate, and without what only decides how often something is written. Runs with
  // equal identities differ in nothing else.
  std::string identity(const run::Numerics& numerics) const;
};
// The numerics versions of the operators and mixers that a step of training calls on "cpu" or
// "cuda". Runs a step of a small part of the model on the CPU.
run::Numerics numerics_of(const RunConfig& config, const std::string& device);
// BadInput with place and nearest name. `ranks`: the number of processes that will train.
RunConfig read_run_config(const ConfigNode& file, const fs::path& store, int64_t ranks = 1);

}  // namespace assay::train
