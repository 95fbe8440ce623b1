#include "train/run_evaluation.h"

#include <torch/torch.h>

#include <chrono>

#include "eval/end_losses.h"
#include "eval/probes.h"

namespace assay::train {

RunEvaluation::RunEvaluation(nn::LanguageModel& model, const data::TokenStore& store,
                             const TrainConfig& config, const run::Folder& folder,
                             DivergenceCheck& divergence)
    : model_(model),
      store_(store),
      c_(config),
      folder_(folder),
      divergence_(divergence),
      along_run_(held_out(config.eval_tokens)) {}

run::EvaluationLine RunEvaluation::evaluate(const run::TrainingState& state) {
  const auto start = std::chrono::steady_clock::now();
  const eval::Losses losses = along_run_.run(model_);
  held_out_loss_ = loss_on_training_domains(losses);
  for (const auto& [name, set] : losses)
    divergence_.check_held_out(state.step, name, set.total().nll);
  check_possible(state.step, losses);
  const fs::path file = folder_.document_losses(state.step);
  make_folder(file.parent_path());
  eval::write_losses(file, losses);
  constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  run::EvaluationLine line{
      .step = state.step,
      .tokens = state.step * c_.tokens_per_step(),
      .evaluation = eval::summary(losses),
      .held_out_loss = held_out_loss_.value_or(kNone),
      .train_loss =
          state.evaluation_steps ? state.evaluation_loss / double(state.evaluation_steps) : kNone,
      .seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()};
  if (const at::Tensor tokens = probe_tokens(1); tokens.defined())
    if (const auto entropy = eval::attention_entropy(model_, tokens); !entropy.empty())
      line.attention_entropy = entropy;
  return line;
}

void RunEvaluation::evaluate_end(const run::TrainingState& state) {
  const eval::Losses losses = held_out(c_.end_tokens).run(model_);
  held_out_loss_ = loss_on_training_domains(losses);
  check_possible(state.step, losses);
  const run::End end{.step = state.step,
                     .tokens = state.step * c_.tokens_per_step(),
                     .sets = eval::end_losses(losses, store_)};
  for (const auto& [name, set] : end.sets) divergence_.check_end(state.step, name, set.loss);
  folder_.end().write(end);
}

void RunEvaluation::write_probes(const run::TrainingState& state) const {
  const at::Tensor tokens = probe_tokens(4);
  if (!tokens.defined()) return;
  run::Probes found = eval::probe(model_, tokens);
  found.step = state.step;
  found.set = c_.eval_sets.front();
  folder_.probes().write(found);
}

eval::HeldOut RunEvaluation::held_out(int64_t max_tokens) const {
  return {store_,
          {c_.eval_sets, c_.domains, c_.sequence_length, max_tokens,
           c_.micro_batch_size * c_.sequence_length}};
}

// A synthetic store knows the loss of a predictor that knows set and table of every document
// (data/synthetic.h). A model can have a lower one on a sample of the documents, and because it
// also predicts where they end, so a tenth and 0.05 nats are allowed.
void RunEvaluation::check_possible(int64_t step, const eval::Losses& losses) const {
  const auto oracle = nlohmann::json::json_pointer("/synthetic/oracle_loss");
  if (!store_.manifest().contains(oracle)) return;
  for (const auto& [name, least] : store_.manifest()[oracle].items()) {
    const auto found = losses.find(name);
    if (found == losses.end() || name.ends_with(".train") || !least.is_number()) continue;
    const double loss = found->second.total().loss();
    if (found->second.total().tokens > 0 && loss < 0.9 * least.get<double>() - 0.05)
      fail<Error>(
          "step {}: The held-out loss on {} is {:.3f}. No correct model goes below {:.3f}, "
          "the loss of a predictor that knows how this synthetic text was made. "
          "So the model reads the tokens that it predicts, and its losses mean nothing. "
          "Check that its mixers are causal (tests MixerForms).",
          step, name, loss, least.get<double>());
  }
}

// Mean over the valid splits of the training domains, or over their other sets without these.
std::optional<double> RunEvaluation::loss_on_training_domains(const eval::Losses& losses) const {
  const auto mean = [&](const std::string& split) -> std::optional<double> {
    double sum = 0;
    int64_t count = 0;
    for (const auto& [name, set] : losses) {
      const size_t dot = name.rfind('.');
      if (!std::ranges::count(c_.domains, name.substr(0, dot))) continue;
      if (!split.empty() && name.substr(dot + 1) != split) continue;
      sum += set.total().loss();
      ++count;
    }
    return count > 0 ? std::optional(sum / double(count)) : std::nullopt;
  };
  const std::optional<double> valid = mean("valid");
  return valid ? valid : mean("");
}

// Held-out text of the first set; undefined where there is none that is long enough to ask about.
at::Tensor RunEvaluation::probe_tokens(int64_t sequences) const {
  if (c_.eval_sets.empty()) return {};
  const at::Tensor tokens = eval::probe_tokens(
      store_, c_.eval_sets.front(), std::min(eval::kProbeLength, c_.sequence_length), sequences);
  return tokens.size(1) < eval::kProbeLeast ? at::Tensor() : tokens;
}

}  // namespace assay::train
