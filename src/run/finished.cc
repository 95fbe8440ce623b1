#include "run/finished.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/error.h"

namespace assay::run {
namespace {

void round_numbers(double& value, int decimals) {
  const double scale = std::pow(10.0, decimals);
  value = std::round(value * scale) / scale;
}
void round_numbers(auto& values, int decimals) {
  for (auto& value : values) round_numbers(value, decimals);
}
void round_numbers(Probes& probes, int decimals) {
  const auto round_probe = [&](auto& probe) {
    round_numbers(probe.visibility, decimals);
    round_numbers(probe.uniformity, decimals);
    round_numbers(probe.real_relation, decimals);
    round_numbers(probe.attention_entropy, decimals);
  };
  round_numbers(probes.threshold, decimals);
  std::ranges::for_each(probes.layers, round_probe);
  round_probe(probes.mean);
}
double rounded(double value, int decimals) {
  round_numbers(value, decimals);
  return value;
}

RunRecord::Evaluation record_of(const EvaluationLine& line) {
  RunRecord::Evaluation out{
      .step = line.step, .tokens = line.tokens, .attention_entropy = line.attention_entropy};
  for (const auto& [name, set] : line.evaluation) out.losses[name] = rounded(set.loss, 5);
  if (out.attention_entropy) round_numbers(*out.attention_entropy, 3);
  return out;
}

EvaluationLine line_of(const RunRecord::Evaluation& evaluation) {
  EvaluationLine out{.step = evaluation.step,
                     .tokens = evaluation.tokens,
                     .attention_entropy = evaluation.attention_entropy};
  for (const auto& [name, loss] : evaluation.losses) out.evaluation[name].loss = loss;
  return out;
}

// A record has no shares: every token is in one of these two slices.
int64_t tokens_of(const RunRecord::Slices& slices) {
  int64_t tokens = 0;
  for (const auto& [name, value] : slices)
    if (name == slice::kRepeatedBigram || name == slice::kOther) tokens += value.second;
  return tokens;
}

void set_slices(EvaluatedSet& set, const RunRecord::Slices& slices) {
  set.tokens = tokens_of(slices);
  for (const auto& [slice, value] : slices) {
    const auto [loss, tokens] = value;
    const double share = double(tokens) / std::max(1.0, double(*set.tokens));
    (*set.slices)[slice] = {.loss = loss, .tokens = tokens, .share = share};
  }
}

}  // namespace

FinishedRun read_finished(const Folder& folder) {
  if (!folder.end().exists())
    fail(
        "{}: holds no {}, the losses at the end of the run; "
        "an earlier version of Assay trained it. Remove the folder, "
        "and the same command trains it again.",
        folder.path.string(), folder.end().path.filename().string());
  FinishedRun out{.config = read_file(folder.config()),
                  .provenance = folder.provenance().read(),
                  .outcome = folder.outcome().read(),
                  .end = folder.end().read(),
                  .metrics = read_metrics(folder)};
  if (folder.probes().exists()) out.outcome.probes = folder.probes().read();
  if (folder.tasks().exists()) out.tasks = folder.tasks().read().results;
  return out;
}

bool is_record(const nlohmann::json& json, const std::string& file) {
  if (!json.is_object() || !json.contains("format") || !json["format"].is_string()) return false;
  const std::string format = json["format"];
  if (format == RunRecord::kFormat) return true;
  if (format.starts_with(RunRecord::kFormats))
    fail(
        "{}: The record has the format {}, and this version of Assay reads {}. "
        "Write it again with `assay report STUDY --records FOLDER`. Nothing was changed.",
        file, format, RunRecord::kFormat);
  return false;
}

RunRecord record_of(const FinishedRun& run) {
  RunRecord out{
      .config = run.config, .provenance = run.provenance, .outcome = run.outcome, .end = run.end};
  if (!run.tasks.empty()) out.tasks = run.tasks;
  out.provenance.data_folder.reset();  // a path of the machine says nothing to others
  if (out.outcome.probes) round_numbers(*out.outcome.probes, 4);
  for (const TrainingLine& line : run.metrics.training)
    out.training.emplace_back(line.step, rounded(line.loss, 4));
  for (const EvaluationLine& line : run.metrics.evaluations)
    out.evaluations.push_back(record_of(line));
  if (run.metrics.evaluations.empty()) return out;
  for (const auto& [name, set] : run.metrics.evaluations.back().evaluation)
    if (set.slices)
      for (const auto& [slice, value] : *set.slices)
        out.slices[name][slice] = {rounded(value.loss, 4), value.tokens};
  return out;
}

FinishedRun run_of(const RunRecord& record) {
  FinishedRun out{.config = record.config,
                  .provenance = record.provenance,
                  .outcome = record.outcome,
                  .end = record.end,
                  .tasks = record.tasks.value_or(std::vector<TaskResult>())};
  for (const auto& [step, loss] : record.training)
    out.metrics.training.push_back({.step = step, .loss = loss});
  for (const RunRecord::Evaluation& evaluation : record.evaluations)
    out.metrics.evaluations.push_back(line_of(evaluation));
  if (out.metrics.evaluations.empty()) return out;
  EvaluatedSets& last = out.metrics.evaluations.back().evaluation;
  for (const auto& [name, slices] : record.slices) {
    last[name].slices.emplace();
    set_slices(last[name], slices);
  }
  return out;
}

}  // namespace assay::run
