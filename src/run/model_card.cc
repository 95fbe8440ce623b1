#include "run/model_card.h"

#include <cmath>
#include <numeric>

#include "base/config.h"
#include "run/metrics.h"

namespace assay::run {
namespace {

struct Loss {
  std::string set;  // "arxiv.test"
  double nats = 0;  // per token
  double bits_per_byte = 0;
  int64_t tokens = 0;
};
struct Score {
  std::string task;
  std::string metric;
  double value = 0;
  int64_t items = 0;
};
struct Measured {
  std::vector<Loss> losses;
  std::vector<Score> scores;
};

std::string number(double value) { return fmt::format("{:.4f}", value); }

// A JSON string is a string of YAML, too.
std::string quoted(const std::string& text) {
  using Json = nlohmann::json;
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

double score_of(const TaskMetric& metric, int64_t items) {
  const auto sum = [](const std::vector<double>& values) {
    return std::accumulate(values.begin(), values.end(), 0.0);
  };
  if (metric.bits) return sum(values_of(*metric.bits, items)) / double(items);
  if (!metric.sums || !metric.weights) return std::nan("");
  return likelihood_metric(metric.name, sum(*metric.sums) / sum(*metric.weights));
}

Measured measured_at(const Folder& run, int64_t step) {
  Measured out;
  const bool ended = run.end().exists() && run.end().read().step == step;
  if (ended) {
    for (const auto& [name, set] : run.end().read().sets)
      out.losses.push_back({name, set.loss, set.bits_per_byte, set.tokens});
    if (run.tasks().exists())
      for (const TaskResult& task : run.tasks().read().results)
        for (const TaskMetric& metric : task.metrics)
          out.scores.push_back({task.name, metric.name, score_of(metric, task.items), task.items});
  } else if (fs::exists(run.metrics())) {
    for (const EvaluationLine& line : read_metrics(run).evaluations)
      if (line.step == step)
        for (const auto& [name, set] : line.evaluation)
          out.losses.push_back(
              {name, set.loss, set.bits_per_byte.value_or(0), set.tokens.value_or(0)});
  }
  std::erase_if(out.losses, [](const Loss& loss) { return !std::isfinite(loss.nats); });
  std::erase_if(out.scores, [](const Score& score) { return !std::isfinite(score.value); });
  return out;
}

struct Metric {
  std::string type;
  std::string name;
  double value = 0;
};

// An element of `results`. The data are not a data set of the Hub, so their type is "custom".
std::string result_yaml(const std::string& dataset, const std::string& split,
                        const std::vector<Metric>& metrics) {
  std::string out = fmt::format(
      "      - task:\n          type: text-generation\n"
      "        dataset:\n          type: custom\n          name: {}\n",
      quoted(dataset));
  if (!split.empty()) out += fmt::format("          split: {}\n", quoted(split));
  out += "        metrics:\n";
  for (const Metric& metric : metrics)
    out += fmt::format("          - type: {}\n            name: {}\n            value: {}\n",
                       quoted(metric.type), quoted(metric.name), number(metric.value));
  return out;
}

std::string metadata(const CardModel& model, const Measured& measured) {
  std::string out = "---\n";
  if (!model.library.empty()) out += fmt::format("library_name: {}\n", model.library);
  out += "pipeline_tag: text-generation\ntags:\n  - assay\n";
  std::string results;
  for (const Loss& loss : measured.losses) {
    std::vector<Metric> metrics = {{"loss", "nats per token", loss.nats}};
    if (loss.bits_per_byte > 0)
      metrics.insert(metrics.begin(), {"bits_per_byte", "bits per byte", loss.bits_per_byte});
    const size_t dot = loss.set.rfind('.');
    results += result_yaml(loss.set.substr(0, dot),
                           dot == std::string::npos ? "" : loss.set.substr(dot + 1), metrics);
  }
  for (const Score& score : measured.scores)
    results += result_yaml(score.task, "", {{score.metric, score.metric, score.value}});
  if (!results.empty())
    out += fmt::format("model-index:\n  - name: {}\n    results:\n{}", quoted(model.name), results);
  return out + "---\n";
}

std::string results_text(const Measured& measured, int64_t step) {
  std::string out;
  if (!measured.losses.empty()) {
    out += fmt::format(
        "\n## Losses\n\nMeasured after step {}; a text is `DOMAIN.SPLIT`.\n\n"
        "| text | bits per byte | nats per token | tokens |\n|---|---|---|---|\n",
        step);
    for (const Loss& loss : measured.losses)
      out += fmt::format("| {} | {} | {} | {} |\n", loss.set,
                         loss.bits_per_byte > 0 ? number(loss.bits_per_byte) : "–",
                         number(loss.nats), loss.tokens);
  }
  if (!measured.scores.empty()) {
    out += "\n## Tasks\n\n| task | metric | value | items |\n|---|---|---|---|\n";
    for (const Score& score : measured.scores)
      out += fmt::format("| {} | {} | {} | {} |\n", score.task, score.metric, number(score.value),
                         score.items);
  }
  return out;
}

}  // namespace

std::optional<std::string> model_card(const Checkpoint& checkpoint, const CardModel& model) {
  const std::optional<Folder> run = enclosing_run(checkpoint.path);
  if (!run || !run->provenance().exists() || !checkpoint.state().exists()) return std::nullopt;
  const Provenance provenance = run->provenance().read();
  const int64_t step = checkpoint.state().read().step;
  const ConfigNode train = ConfigNode::read_file(run->config()).child("train");
  int64_t batch = 0;
  int64_t length = 0;
  int64_t steps = 0;
  std::vector<std::string> domains;
  train.read(Fields{{"batch_size", &batch, ""},
                    {"sequence_length", &length, ""},
                    {"steps", &steps, ""},
                    {"domains", &domains, ""}},
             train.keys());
  const int64_t tokens = step * batch * length;
  const Measured measured = measured_at(*run, step);

  std::string out = metadata(model, measured);
  out += fmt::format("\n# {}\n\nA language model that was trained and exported with Assay {}.\n",
                     model.name, provenance.assay);
  out += "No license is given; add `license` to the metadata before you publish the model.\n";
  out += "\n| property | value |\n|---|---|\n";
  const auto row = [&](const std::string& name, const std::string& value) {
    out += fmt::format("| {} | {} |\n", name, value);
  };
  row("layout (`model_type`)", fmt::format("`{}`", model.model_type));
  row("parameters", std::to_string(provenance.parameters));
  row("training tokens", std::to_string(tokens));
  row("optimizer steps", fmt::format("{} of {}", step, steps));
  if (provenance.train_tokens.value_or(0) > 0)
    row("passes over the training text",
        fmt::format("{:.3g}", double(tokens) / double(*provenance.train_tokens)));
  row("training domains", domains.empty() ? "all of the store" : join(domains));
  row("SHA-256 of the data", fmt::format("`{}`", provenance.data));
  row("device", provenance.device);
  row("torch", provenance.torch);
  row("commit of Assay", provenance.commit);
  row("started", provenance.started);
  out += results_text(measured, step);
  out += "\n## Training\n\nThis configuration has every default written out.\n";
  out += "The command is `assay train config.toml --data STORE -o RUN`.\n\n```toml\n";
  return out + read_file(run->config()) + "```\n";
}

}  // namespace assay::run
