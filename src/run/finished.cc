#include "run/finished.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/config.h"
#include "base/error.h"
#include "run/training_loss.h"

namespace assay::run {
namespace {

void round_numbers(double& value, int decimals) {
  const double scale = std::pow(10.0, decimals);
  value = std::round(value * scale) / scale;
}
void round_numbers(auto& values, int decimals) {
  for (auto& value : values) round_numbers(value, decimals);
}
double rounded(double value, int decimals) {
  round_numbers(value, decimals);
  return value;
}

// Keeps the means, and the layer with the highest visibility, which the table shows.
void shorten(Probes& probes) {
  const auto best = std::ranges::max_element(probes.layers, {}, &LayerProbe::visibility);
  if (best != probes.layers.end()) probes.layers = {*best};
  for (LayerProbe& layer : probes.layers) layer.attention_entropy.clear();
}

void add_config(const ConfigNode& node, const std::string& table, RunRecord::Config& out) {
  for (const std::string& key : node.keys())
    if (!node.is_table(key)) out[table][key] = node.value(key);
    else add_config(node.child(key), table.empty() ? key : table + "." + key, out);
}

std::string toml_of(const RunRecord::Config& config) {
  std::string out;
  for (const auto& [table, values] : config) {
    if (!table.empty()) out += "[" + table + "]\n";
    for (const auto& [key, value] : values) out += key + " = " + value + "\n";
  }
  return out;
}

// Rounds sums to whole nats. What is rounded off goes to the next sum, so the total stays.
void round_sums(std::vector<double>& sums) {
  double all = 0;
  double written = 0;
  for (double& sum : sums) {
    all += sum;
    sum = std::round(all) - written;
    written += sum;
  }
}

RunRecord::Evaluations evaluations_of(const Metrics& metrics) {
  const size_t count = metrics.evaluations.size();
  RunRecord::Evaluations out{.training_loss = training_losses(metrics)};
  std::vector<double> entropies;
  for (const EvaluationLine& line : metrics.evaluations) {
    for (const auto& [name, set] : line.evaluation)
      out.losses.try_emplace(name, count, NAN).first->second[out.step.size()] =
          rounded(set.loss, 4);
    out.step.push_back(line.step);
    entropies.push_back(rounded(mean_entropy_of(line), 4));
    out.attention_entropy = line.attention_entropy;
  }
  if (!out.attention_entropy) return out;
  out.mean_attention_entropy = entropies;
  round_numbers(*out.attention_entropy, 3);
  return out;
}

std::vector<EvaluationLine> lines_of(const RunRecord& record) {
  const RunRecord::Evaluations& from = record.evaluations;
  const auto is_whole = [&](const auto& list) { return list.size() == from.step.size(); };
  bool whole = is_whole(from.training_loss);
  if (from.mean_attention_entropy) whole = whole && is_whole(*from.mean_attention_entropy);
  for (const auto& [name, losses] : from.losses) whole = whole && is_whole(losses);
  if (!whole)
    fail(
        "The record of the run {} is damaged: the lists of its evaluations differ in length. "
        "Write it again with `assay report STUDY --records FOLDER`.",
        record.name);
  std::vector<EvaluationLine> lines(from.step.size());
  for (size_t i = 0; i < lines.size(); ++i) {
    EvaluationLine& line = lines[i];
    line.step = from.step[i];
    const double done = double(line.step) / double(std::max<int64_t>(1, record.end.step));
    line.tokens = int64_t(std::round(std::clamp(done, 0.0, 1.0) * double(record.end.tokens)));
    line.smooth_training_loss = from.training_loss[i];
    if (from.mean_attention_entropy)
      line.mean_attention_entropy = (*from.mean_attention_entropy)[i];
    for (const auto& [name, losses] : from.losses) line.evaluation[name].loss = losses[i];
  }
  if (!lines.empty()) lines.back().attention_entropy = from.attention_entropy;
  return lines;
}

RunRecord::Slices slices_of(const std::map<std::string, Slice>& slices) {
  RunRecord::Slices out;
  for (const auto& [name, slice] : slices) {
    out.loss[name] = rounded(slice.loss, 3);
    out.tokens[name] = slice.tokens;
  }
  return out;
}

// A record has no shares: every token is in one of the slices repeated_bigram and other.
void set_slices(EvaluatedSet& set, const RunRecord::Slices& slices) {
  int64_t tokens = 0;
  set.slices.emplace();
  for (const auto& [name, count] : slices.tokens) {
    if (name == slice::kRepeatedBigram || name == slice::kOther) tokens += count;
    const auto loss = slices.loss.find(name);
    if (loss != slices.loss.end()) (*set.slices)[name] = {.loss = loss->second, .tokens = count};
  }
  set.tokens = tokens;
  for (auto& [name, slice] : *set.slices)
    slice.share = double(slice.tokens) / std::max(1.0, double(tokens));
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
  RunRecord out{.provenance = run.provenance,
                .outcome = run.outcome,
                .evaluations = evaluations_of(run.metrics),
                .end = run.end};
  add_config(ConfigNode::parse(run.config), "", out.config);
  if (!run.tasks.empty()) out.tasks = run.tasks;
  out.provenance.data_folder.reset();  // a path of the machine says nothing to others
  out.provenance.key.clear();
  if (out.outcome.probes) shorten(*out.outcome.probes);
  for (auto& [name, set] : out.end.sets) {
    round_sums(set.clusters.nll);
    round_sums(set.clusters.recall_nll);
    if (set.clusters.bounded_nll) round_sums(*set.clusters.bounded_nll);
  }
  if (run.metrics.evaluations.empty()) return out;
  for (const auto& [name, set] : run.metrics.evaluations.back().evaluation)
    if (set.slices) out.slices[name] = slices_of(*set.slices);
  return out;
}

FinishedRun run_of(const RunRecord& record) {
  FinishedRun out{.config = toml_of(record.config),
                  .provenance = record.provenance,
                  .outcome = record.outcome,
                  .end = record.end,
                  .metrics = {.evaluations = lines_of(record)},
                  .tasks = record.tasks.value_or(std::vector<TaskResult>())};
  if (out.metrics.evaluations.empty()) return out;
  EvaluatedSets& last = out.metrics.evaluations.back().evaluation;
  for (const auto& [name, slices] : record.slices) set_slices(last[name], slices);
  return out;
}

}  // namespace assay::run
