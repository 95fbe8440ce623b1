#pragma once
// A finished run: its whole folder but the checkpoints, or the compact record of it.
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "run/metrics.h"

namespace assay::run {

struct FinishedRun {
  std::string config;  // config.toml
  Provenance provenance;
  Outcome outcome;  // with the probes
  End end;
  Metrics metrics;
  std::vector<TaskResult> tasks;  // that were evaluated on the final weights
};
// BadInput, with file and key, when the folder is not that of a finished run.
FinishedRun read_finished(const Folder& folder);

// 6 to 15 kB of JSON: everything that a report reads, and no weights.
struct RunRecord {
  static constexpr const char* kFormats = "assay-run-";  // how the names of all versions begin
  static constexpr const char* kFormat = "assay-run-4";
  // By table and key, values as TOML: {"model": {"d_model": "512"}}
  using Config = std::map<std::string, std::map<std::string, std::string>>;
  struct Evaluations {  // lists with one element per evaluation
    std::vector<int64_t> step;
    std::vector<double> training_loss;                  // see training_losses
    std::map<std::string, std::vector<double>> losses;  // by set
    std::optional<std::vector<double>> mean_attention_entropy;
    std::optional<Entropies> attention_entropy;  // at the last evaluation
    ASSAY_FIELDS(step, training_loss, losses, mean_attention_entropy, attention_entropy)
  };
  struct Slices {  // by name of the slice
    std::map<std::string, double> loss;
    std::map<std::string, int64_t> tokens;
    ASSAY_FIELDS(loss, tokens)
  };

  std::string format = kFormat;
  std::string key;
  std::string name;
  std::string model;
  int64_t seed = 0;
  int64_t tokens = 0;
  double learning_rate = 0;
  Config config;
  Provenance provenance;
  Outcome outcome;
  Evaluations evaluations;
  std::map<std::string, Slices> slices;  // of the last evaluation, by set
  End end;
  std::optional<std::vector<TaskResult>> tasks;  // absent when none was evaluated
  ASSAY_FIELDS(format, key, name, model, seed, tokens, learning_rate, config, provenance, outcome,
               evaluations, slices, end, tasks)
};

// Does this JSON say that it is the record of a run? BadInput, with `file`, when it is a record of
// another version.
bool is_record(const nlohmann::json& json, const std::string& file);

// The record of a run, without what the run itself does not know: key, name, model, seed, tokens
// and learning rate. The sums by source are whole nats.
RunRecord record_of(const FinishedRun& run);
// BadInput when the lists of the evaluations differ in length.
FinishedRun run_of(const RunRecord& record);

}  // namespace assay::run
