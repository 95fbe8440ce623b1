#include "train/run_config.h"

#include <torch/torch.h>

#include "base/record.h"
#include "data/token_store.h"
#include "eval/held_out.h"
#include "ops/core/paths.h"

namespace assay::train {

std::string RunConfig::toml() const { return model.toml() + "\n[train]\n" + train.toml(); }

std::string RunConfig::identity(const run::Numerics& numerics) const {
  TrainConfig t = train;
  t.steps = t.tokens = t.seed = 0;
  t.learning_rate = 0;
  if (t.warmup_fraction > 0) t.warmup_steps = 0;
  t.eval_every = t.eval_tokens = t.checkpoint_every = t.log_every = 0;
  t.keep_steps.clear();
  // Sizes that follow from others are 0, as in a file that leaves them out
  if (t.micro_batch_size == t.batch_size / t.gradient_slices) t.micro_batch_size = 0;
  if (t.gradient_slices == 1) t.gradient_slices = 0;
  run::Numerics later;
  for (const auto& [part, version] : numerics)
    if (version != 1) later[part] = version;
  return model.identity() + "\n[train]\n" + to_toml(changed_fields(t)) + "\n" +
         to_json(later).dump();
}

run::Numerics numerics_of(const RunConfig& config, const std::string& device) {
  nn::Parts parts = nn::parts_of(config.model);
  parts.operators.insert("adamw");
  run::Numerics versions = parts.mixers;
  for (const ops::OpPath& path : ops::op_paths())
    if (path.device == device && parts.operators.contains(path.op))
      versions[path.op] = path.numerics;
  return versions;
}

RunConfig read_run_config(const ConfigNode& file, const fs::path& store_folder, int64_t ranks) {
  file.read(Fields{}, {"model", "train"});
  RunConfig config{nn::ModelSpec::read(file.child("model")), {}};
  ConfigNode table = file.child("train");
  if (table.has("batch") && table.has("batch_size"))
    table.refuse("batch", "batch and batch_size in {table} are the same; give one");
  table.rename("batch", "batch_size");
  table.read(config.train, {"batch"});
  config.train.complete(table, ranks);
  const data::TokenStore store(store_folder);
  nn::ModelConfig& model = config.model.config;
  if (model.vocab_size == 0) model.vocab_size = store.vocab_size();
  if (model.vocab_size < store.vocab_size())
    file.child("model").refuse(
        "vocab_size", fmt::format("{{table}}.vocab_size = {} is below the store's {} ({})",
                                  model.vocab_size, store.vocab_size(), store_folder.string()));
  if (model.positions == "learned" && model.max_positions == 0)
    model.max_positions = config.train.sequence_length;
  if (config.train.domains.empty())
    for (const std::string& domain : store.domains())
      if (store.has(domain, "train")) config.train.domains.push_back(domain);
  for (const std::string& domain : config.train.domains) store.documents(domain, "train");
  if (config.train.eval_sets.empty())
    config.train.eval_sets = eval::default_sets(store, config.train.domains);
  for (const std::string& set : config.train.eval_sets)
    store.documents(set.substr(0, set.rfind('.')), set.substr(set.rfind('.') + 1));
  // A forward is a third of a step: 3 % of the run's time over its evaluations
  if (config.train.eval_tokens == 0) {
    const double evaluations = double(config.train.steps) / double(config.train.eval_every) + 1;
    const double sets = double(std::max<size_t>(1, config.train.eval_sets.size()));
    config.train.eval_tokens =
        std::max<int64_t>(config.train.sequence_length,
                          int64_t(0.09 * double(config.train.tokens) / evaluations / sets));
  }
  return config;
}

}  // namespace assay::train
