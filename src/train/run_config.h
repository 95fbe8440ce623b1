#pragma once
// The configuration of a run: its model and its training, with every default filled in.
#include <string>

#include "base/config.h"
#include "base/files.h"
#include "nn/language_model.h"
#include "train/config.h"

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

}  // namespace assay::train
