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

// About 30 kB of JSON (more with many domains): everything that a report reads, and no weights.
struct RunRecord {
  static constexpr const char* kFormats = "assay-run-";  // how the names of all versions begin
  static constexpr const char* kFormat = "assay-run-2";
  struct Evaluation {
    int64_t step = 0;
    int64_t tokens = 0;
    std::map<std::string, double> losses;  // by set
    std::optional<Entropies> attention_entropy;
    ASSAY_FIELDS(step, tokens, losses, attention_entropy)
  };
  using Slices = std::map<std::string, std::pair<double, int64_t>>;  // {loss, tokens}

  std::string format = kFormat;
  std::string key;
  std::string name;
  std::string model;
  int64_t seed = 0;
  int64_t tokens = 0;
  double learning_rate = 0;
  std::string config;
  Provenance provenance;
  Outcome outcome;
  std::vector<std::pair<int64_t, double>> training;  // {step, loss}
  std::vector<Evaluation> evaluations;
  std::map<std::string, Slices> slices;  // of the last evaluation, by set
  End end;
  std::optional<std::vector<TaskResult>> tasks;  // absent when none was evaluated
  ASSAY_FIELDS(format, key, name, model, seed, tokens, learning_rate, config, provenance, outcome,
               training, evaluations, slices, end, tasks)
};

// Does this JSON say that it is the record of a run? BadInput, with `file`, when it is a record of
// another version.
bool is_record(const nlohmann::json& json, const std::string& file);

// The record of a run, without what the run itself does not know: key, name, model, seed, tokens
// and learning rate.
RunRecord record_of(const FinishedRun& run);
FinishedRun run_of(const RunRecord& record);

}  // namespace assay::run
