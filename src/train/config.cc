#include "train/config.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <set>

#include "run/folder.h"
#include "train/gradient_sum.h"

namespace assay::train {

void TrainConfig::complete(const ConfigNode& table, int64_t ranks) {
  const auto need = [&](bool good, const char* key, const std::string& expected) {
    if (!good) table.refuse(key, fmt::format("{{table}}.{} must be {}", key, expected));
  };
  const auto one_of = [&](const std::string& value, const char* key,
                          std::vector<std::string> names) {
    if (std::ranges::find(names, value) == names.end())
      table.refuse(key, fmt::format("{{table}}.{} = '{}' must be one of {}{}", key, value,
                                    join(names), did_you_mean(value, names)));
  };
  need(batch_size > 0, "batch_size", "positive");
  need(sequence_length > 0, "sequence_length", "positive");
  need(sequence_length < (int64_t{1} << 31) && batch_size < (int64_t{1} << 31) / sequence_length,
       "batch_size", "below 2^31 tokens per step");
  need(steps >= 0, "steps", "positive");
  need(tokens >= 0, "tokens", "positive");
  need(steps < (int64_t{1} << 32) && tokens < (int64_t{1} << 62), "steps",
       "below 2^32, and train.tokens below 2^62");
  need((steps > 0) != (tokens > 0) || (steps > 0 && steps * tokens_per_step() == tokens), "steps",
       "given, or train.tokens, and not both");
  if (steps == 0) steps = (tokens + tokens_per_step() - 1) / tokens_per_step();
  tokens = steps * tokens_per_step();
  need(gradient_slices >= 0, "gradient_slices", "0 or more");
  need(context_slices > 0 && sequence_length % context_slices == 0, "context_slices",
       fmt::format("a divisor of {{table}}.sequence_length = {}", sequence_length));
  if (gradient_slices == 0) gradient_slices = std::max<int64_t>(1, ranks / context_slices);
  check_shares(batch_size, gradient_slices, context_slices, ranks);
  const int64_t slice = batch_size / gradient_slices;
  if (micro_batch_size == 0) micro_batch_size = slice;
  need(micro_batch_size > 0 && slice % micro_batch_size == 0, "micro_batch_size",
       gradient_slices == 1 ? "a divisor of batch_size"
                            : "a divisor of batch_size / gradient_slices");
  need(learning_rate >= 0 && std::isfinite(learning_rate), "learning_rate",
       "a finite number, 0 or more");
  need(warmup_steps >= 0, "warmup_steps", "0 or more");
  need(warmup_fraction >= 0 && warmup_fraction < 1, "warmup_fraction", "at least 0 and below 1");
  need(warmup_steps == 0 || warmup_fraction == 0 || warmup_steps == warmup_steps_of_fraction() ||
           warmup_steps == earlier_warmup_steps(),
       "warmup_fraction", "left out when train.warmup_steps is given");
  if (warmup_fraction > 0 && warmup_steps == 0) warmup_steps = warmup_steps_of_fraction();
  one_of(schedule, "schedule", {"linear", "cosine", "wsd", "constant"});
  one_of(precision, "precision", {"auto", "bf16", "fp32", "fp64"});
  need(final_learning_rate >= 0 && final_learning_rate <= 1, "final_learning_rate",
       "between 0 and 1");
  need(decay_fraction >= 0 && decay_fraction <= 1, "decay_fraction", "between 0 and 1");
  need(beta1 >= 0 && beta1 < 1, "beta1", "in [0, 1)");
  need(beta2 >= 0 && beta2 < 1, "beta2", "in [0, 1)");
  need(epsilon > 0, "epsilon", "positive");
  need(weight_decay >= 0, "weight_decay", "0 or more");
  need(clip >= 0, "clip", "0 or more");
  need(spike >= 0, "spike", "0 or more");
  need(std::set(domains.begin(), domains.end()).size() == domains.size(), "domains",
       "a list that names no domain twice");
  need(eval_every >= 0, "eval_every", "0 or more");
  need(eval_tokens >= 0, "eval_tokens", "0 or more");
  need(end_tokens >= 0, "end_tokens", "0 or more");
  need(checkpoint_every >= 0, "checkpoint_every", "0 or more");
  need(log_every >= 0, "log_every", "0 or more");
  need(std::ranges::all_of(keep_steps, [&](int64_t step) { return 1 <= step && step <= steps; }),
       "keep_steps", fmt::format("a list of steps from 1 to {}, the last one", steps));
  if (eval_every == 0) eval_every = std::max<int64_t>(1, steps / 20);
  if (log_every == 0) log_every = std::max<int64_t>(1, steps / 200);
}

std::string TrainConfig::toml() const {
  TrainConfig copy = *this;
  return to_toml(fields_of(copy));
}

std::optional<TrainConfig> train_config_of(const std::filesystem::path& model) {
  const auto run = run::enclosing_run(model);
  if (!run) return std::nullopt;
  const ConfigNode file = ConfigNode::read_file(run->config());
  if (!file.has("train")) return std::nullopt;
  TrainConfig config;
  file.child("train").read(config);
  return config;
}

double learning_rate_at(const TrainConfig& c, int64_t step) {
  if (step < c.warmup_steps) return c.learning_rate * double(step + 1) / double(c.warmup_steps);
  const auto decayed = [&](double done) {  // done: 0 … 1 of the decay
    const double shape =
        c.schedule == "cosine" ? 0.5 * (1 + std::cos(std::numbers::pi * done)) : 1 - done;
    return c.learning_rate * (c.final_learning_rate + (1 - c.final_learning_rate) * shape);
  };
  const double span = double(std::max<int64_t>(1, c.steps - c.warmup_steps));
  const double at = double(step - c.warmup_steps) / span;
  if (c.schedule == "constant") return c.learning_rate;
  if (c.schedule == "wsd")
    return decayed(
        c.decay_fraction > 0 ? std::max(0.0, (at - 1 + c.decay_fraction) / c.decay_fraction) : 0);
  return decayed(std::min(1.0, at));
}

}  // namespace assay::train
