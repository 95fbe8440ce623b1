// assay eval loss RUN --data STORE
#include "eval/held_out.h"

#include <nlohmann/json.hpp>

#include "base/config.h"
#include "cli/command.h"
#include "cli/model.h"
#include "train/config.h"
#include "train/metrics.h"

namespace assay::cli {
namespace {

using nlohmann::json;

struct Options {
  ModelOptions model;
  std::string store, split, output;
  std::vector<std::string> sets;
  int64_t sequence_length = 0, tokens = 0;
};

// What a run was trained on; the defaults for a model that is no run.
train::TrainConfig training_of(const TrainedModel& trained) {
  train::TrainConfig config;
  if (trained.config.empty()) return config;
  const ConfigNode file = ConfigNode::read_file(trained.config);
  if (file.has("train")) file.child("train").read(config);
  return config;
}

void check_tokenizer(const TrainedModel& trained, const data::TokenStore& store) {
  const int64_t vocabulary = trained.model->spec.config.vocab_size;
  if (store.vocab_size() > vocabulary)
    fail("{}: its vocabulary of {} does not fit {}, which has {}", store.folder().string(), store.vocab_size(), trained.path, vocabulary);
  if (trained.tokenizer_file.empty() || store.tokenizer().sha256.empty()) return;
  if (sha256_of_file(trained.tokenizer_file) != store.tokenizer().sha256)
    fail("{}: its tokens were made with another tokenizer than that of {} ({})", store.folder().string(), trained.path,
         trained.tokenizer_file.string());
}

std::vector<std::string> wanted_sets(const Options& o, const data::TokenStore& store, const std::vector<std::string>& trained) {
  if (!o.sets.empty()) return o.sets;
  if (o.split.empty()) return eval::default_sets(store, trained);
  std::vector<std::string> sets;
  for (const std::string& domain : store.domains())
    if (store.has(domain, o.split)) sets.push_back(domain + "." + o.split);
  if (sets.empty()) fail("{}: no domain has the split '{}'", o.store, o.split);
  return sets;
}

std::string table(const json& losses) {
  std::string out = fmt::format("{:<24} {:>9} {:>12} {:>10} {:>10}\n", "set", "documents", "tokens", "loss", "bits/byte");
  for (const auto& [name, set] : losses.items())
    out += fmt::format("{:<24} {:>9} {:>12} {:>10.4f} {:>10.4f}\n", name, set["documents"].get<int64_t>(),
                       set["tokens"].get<int64_t>(), set["loss"].get<double>(), set["bits_per_byte"].get<double>());
  return out;
}

void run_loss(const Options& o) {
  const data::TokenStore store(o.store);
  TrainedModel trained(o.model);
  check_tokenizer(trained, store);
  const train::TrainConfig training = training_of(trained);
  std::vector<std::string> domains;
  for (const std::string& domain : training.domains)
    if (store.has(domain, "train")) domains.push_back(domain);
  const int64_t length = o.sequence_length > 0 ? o.sequence_length : training.sequence_length;
  const eval::Losses losses = eval::HeldOut(store, {wanted_sets(o, store, domains), domains, length, o.tokens}).run(*trained.model);
  if (!o.output.empty()) train::write_losses(o.output, losses);
  const json result = train::to_json(losses);
  print({{"model", trained.path}, {"data", store.fingerprint()}, {"sequence_length", length}, {"losses", result}}, table(result));
}

void add_loss(CLI::App& eval) {
  auto o = std::make_shared<Options>();
  CLI::App* command = subcommand(eval, "loss", "held-out loss per domain, per document, and in slices (--json)");
  add_model_options(*command, o->model, "RUN");
  command->add_option("--data", o->store, "token store")->required();
  auto* split = command->add_option("--split", o->split, "this split of every domain; default: valid of those trained on, test of all");
  command->add_option("--sets", o->sets, "DOMAIN.SPLIT, separated by commas")->delimiter(',')->excludes(split);
  command->add_option("--sequence-length", o->sequence_length, "context; default: the run's")->check(CLI::PositiveNumber);
  command->add_option("--tokens", o->tokens, "predicted tokens a set, first pieces of all documents first; 0: all")->check(CLI::NonNegativeNumber);
  command->add_option("-o,--output", o->output, "safetensors file for the losses of single documents");
  command->callback([o] { run_loss(*o); });
}

void add(CLI::App& app) {
  CLI::App* eval = app.add_subcommand("eval", "what a trained model does on held-out data: loss");
  eval->require_subcommand(1);
  add_loss(*eval);
}
[[maybe_unused]] const bool registered = commands().add("eval", add);

}  // namespace
}  // namespace assay::cli
