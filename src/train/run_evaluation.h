#pragma once
// Measurements of a run's model in addition to the training loss: held-out losses along the run and
// at its end, and probes. Only the process that writes the run folder measures.
#include <optional>

#include "data/token_store.h"
#include "eval/held_out.h"
#include "nn/language_model.h"
#include "run/folder.h"
#include "train/config.h"
#include "train/divergence.h"

namespace assay::train {

class RunEvaluation {
 public:
  // All must outlive this.
  RunEvaluation(nn::LanguageModel& model, const data::TokenStore& store, const TrainConfig& config,
                const run::Folder& folder, DivergenceCheck& divergence);

  // Along the run: writes the losses of documents, and returns the line for the metrics.
  run::EvaluationLine evaluate(const run::TrainingState& state);
  // The losses that architectures are compared by, over more text than the evaluations
  // along the run. Writes end.json.
  void evaluate_end(const run::TrainingState& state);
  // Measures how the mixers use earlier positions. Writes probes.json.
  void write_probes(const run::TrainingState& state) const;

  // On the training domains, of the last evaluation in this process.
  std::optional<double> held_out_loss() const { return held_out_loss_; }

 private:
  eval::HeldOut held_out(int64_t max_tokens) const;
  // Refuses losses that no model can have.
  void check_possible(int64_t step, const eval::Losses& losses) const;
  std::optional<double> loss_on_training_domains(const eval::Losses& losses) const;
  at::Tensor probe_tokens(int64_t sequences) const;

  nn::LanguageModel& model_;
  const data::TokenStore& store_;
  const TrainConfig& c_;
  const run::Folder& folder_;
  DivergenceCheck& divergence_;
  eval::HeldOut along_run_;
  std::optional<double> held_out_loss_;
};

}  // namespace assay::train
