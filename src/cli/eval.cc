// assay eval loss RUN --data STORE, assay eval probe RUN --data STORE,
// assay losses MODEL --data STORE
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/model.h"
#include "data/token_store.h"
#include "eval/held_out.h"
#include "eval/probes.h"
#include "run/folder.h"
#include "study/store.h"
#include "train/config.h"

namespace assay::cli {
namespace {

using Json = nlohmann::json;

struct Options {
  ModelOptions model;
  std::string data;
  std::string split;
  std::string set;
  std::string documents;
  // of `assay losses`
  std::string name;
  std::string output;
  int64_t trained_tokens = 0;  // the same
  int64_t seed = -1;           // the same
  int64_t length = 0;
  int64_t tokens = 0;
  int64_t sequences = 4;
  eval::ProbeOptions probe;
};

std::string row(const std::string& name, const std::vector<std::string>& cells) {
  std::string out = fmt::format("{:<20}", name);
  for (const std::string& cell : cells) out += fmt::format(" {:>17}", cell);
  return out + "\n";
}
std::string number(double value) {
  return std::isfinite(value) ? fmt::format("{:.4f}", value) : "-";
}

// How the model was trained, as far as its data matter here; for a model without a run,
// the whole store.
train::TrainConfig trained(const Options& o, const data::TokenStore& store) {
  if (auto config = train::train_config_of(o.model.model)) return *config;
  train::TrainConfig config;
  for (const std::string& domain : store.domains())
    if (store.has(domain, "train")) config.domains.push_back(domain);
  config.eval_sets = eval::default_sets(store, config.domains);
  return config;
}

std::vector<std::string> sets_of(const std::string& split, const data::TokenStore& store,
                                 const train::TrainConfig& config) {
  if (split.empty() && !config.eval_sets.empty()) return config.eval_sets;
  std::vector<std::string> sets;
  for (const std::string& domain : store.domains())
    if (store.has(domain, split)) sets.push_back(domain + "." + split);
  if (sets.empty())
    fail("{}: no domain has a split '{}' to evaluate", store.folder().string(), split);
  return sets;
}

void show_losses(const Options& o) {
  if (!o.documents.empty()) check_output(o.documents);
  const TrainedModel model(o.model);
  const data::TokenStore store(o.data);
  model.check_store(store);
  const train::TrainConfig config = trained(o, store);
  const int64_t length = o.length > 0 ? o.length : config.sequence_length;
  const eval::HeldOut held_out(store,
                               {sets_of(o.split, store, config), config.domains, length, o.tokens});
  const eval::Losses losses = held_out.run(*model.model);
  for (const auto& [name, set] : losses)
    if (set.total().tokens > 0 && !std::isfinite(set.total().loss()))
      fail<Error>("{}: the loss of {} is {}. Nothing was written.", o.model.model, name,
                  set.total().loss());
  if (!o.documents.empty()) eval::write_losses(o.documents, losses);
  std::string text = row("", {"loss", "bits per byte", "tokens", "documents"});
  for (const auto& [name, set] : losses)
    text += row(name, {number(set.total().loss()), number(set.bits_per_byte()),
                       std::to_string(set.total().tokens), std::to_string(set.nll.size())});
  print({{"model", o.model.model},
         {"data", store.fingerprint()},
         {"sequence_length", length},
         {"evaluation", to_json(eval::summary(losses))}},
        text);
}

// Training tokens of the weights: those up to their checkpoint, or −1 without one.
int64_t tokens_of(const TrainedModel& model, const train::TrainConfig& config) {
  const run::Checkpoint checkpoint{model.weights.at(0).parent_path()};
  return checkpoint.state().exists() ? checkpoint.state().read().step * config.tokens_per_step()
                                     : -1;
}

// The name in the plan for a run of a study, else that of the folder of the run or model.
std::string model_name(const std::string& model) {
  const auto run = run::enclosing_run(model);
  // Without a "/" at the end
  const fs::path folder = fs::absolute((run ? run->path : fs::path(model)) / "").parent_path();
  const fs::path study = folder.parent_path().parent_path();
  if (fs::exists(study / "study.sqlite"))
    for (const auto& of_study : study::Store(study, study::Database::Mode::read).planned_runs())
      if (fs::path(of_study.folder).filename() == folder.filename()) return of_study.model;
  return folder.filename().string();
}

// The run line of a file of losses (study/losses.h).
Json run_line(const Options& o, const TrainedModel& model, const data::TokenStore& store,
              const train::TrainConfig& config) {
  int64_t train_tokens = 0;
  for (const std::string& domain : config.domains)
    train_tokens += store.documents(domain, "train").tokens();
  Json line = {{"model", o.name.empty() ? model_name(o.model.model) : o.name},
               {"seed", o.seed >= 0 ? o.seed : config.seed},
               {"tokens", o.trained_tokens > 0 ? o.trained_tokens : tokens_of(model, config)},
               {"parameters", model.model->parameter_count()},
               {"tokenizer", store.tokenizer().sha256}};
  if (line["tokens"].get<int64_t>() <= 0)
    fail(
        "{}: The model does not say how many tokens it was trained on; give --tokens N. "
        "Nothing was written.",
        o.model.model);
  if (train_tokens > 0) line["epochs"] = line["tokens"].get<double>() / double(train_tokens);
  return {{"run", line}};
}

std::string document_lines(const std::string& set, const eval::SetLosses& losses,
                           const data::TokenStore& store) {
  const auto [domain, split] = eval::domain_and_split(set);
  const data::Documents& documents = store.documents(domain, split);
  std::string out;
  for (size_t i = 0; i < losses.nll.size(); ++i) {
    Json line = {{"role", split == "test" ? "out_of_domain" : "held_out"},
                 {"domain", domain},
                 {"document", std::to_string(losses.documents[i])},
                 {"nats", losses.nll[i]},
                 {"tokens", losses.tokens[i]},
                 {"recall_nats", losses.recall_nll[i]},
                 {"recall_tokens", losses.recall_tokens[i]}};
    if (losses.bytes[i] > 0) line["bytes"] = losses.bytes[i];
    const int64_t source =
        documents.has_sources() ? documents.source(losses.documents[i]) : int64_t{-1};
    if (source >= 0) line["source"] = documents.source_names().at(size_t(source));
    out += line.dump() + "\n";
  }
  return out;
}

void write_judged_losses(const Options& o) {
  check_output(o.output);
  const TrainedModel model(o.model);
  const data::TokenStore store(o.data);
  model.check_store(store);
  const train::TrainConfig config = trained(o, store);
  std::string text = run_line(o, model, store, config).dump() + "\n";
  const int64_t length = o.length > 0 ? o.length : config.sequence_length;
  const eval::HeldOut held_out(store, {sets_of("", store, config), config.domains, length, 0});
  const eval::Losses losses = held_out.run(*model.model);
  int64_t documents = 0;
  for (const auto& [set, of_set] : losses) {
    text += document_lines(set, of_set, store);
    documents += int64_t(of_set.nll.size());
  }
  write_file(o.output, text);
  print({{"losses", o.output}, {"documents", documents}},
        fmt::format("Losses of {} documents: {}\n", documents, o.output));
}

std::string entropies(const std::vector<double>& heads) {
  std::vector<std::string> out;
  for (const double head : heads) out.push_back(number(head));
  return join(out, " ");
}

void show_probe(const Options& o) {
  if (o.probe.threshold < 0 || o.probe.threshold >= 1)
    fail("--threshold {}: it is a share, from 0 to below 1", o.probe.threshold);
  const TrainedModel model(o.model);
  const data::TokenStore store(o.data);
  model.check_store(store);
  const train::TrainConfig config = trained(o, store);
  const std::string set = o.set.empty() ? sets_of("", store, config).front() : o.set;
  const int64_t length =
      o.length > 0 ? o.length : std::min(eval::kProbeLength, config.sequence_length);
  const at::Tensor tokens = eval::probe_tokens(store, set, length, o.sequences);
  run::Probes found = eval::probe(*model.model, tokens, o.probe);
  found.set = set;
  std::string text = fmt::format("{} of {}, {} tokens each\n", counted(tokens.size(0), "text"), set,
                                 tokens.size(1));
  text += row("layer", {"visibility", "uniformity", "real relation", "attention entropy, by head"});
  for (const run::LayerProbe& layer : found.layers)
    text += row(fmt::format("{} {}", layer.layer, layer.mixer),
                {number(layer.visibility), number(layer.uniformity), number(layer.real_relation),
                 entropies(layer.attention_entropy)});
  const run::MeanProbe& mean = found.mean;
  text += row("mean", {number(mean.visibility), number(mean.uniformity), number(mean.real_relation),
                       number(mean.attention_entropy)});
  Json document = to_json(found);
  document["model"] = o.model.model;
  print(document, text);
}

void add_common(CLI::App& command, Options& o) {
  add_model_options(command, o.model, "RUN");
  command.add_option("--data", o.data, "token store")->required();
  command.add_option("--length", o.length, "tokens of context; default: the run's sequence_length")
      ->check(positive_number());
}

void add(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("eval", "measure a trained model: losses, tasks, probes of its mixers");
  command->require_subcommand(1);
  auto loss = std::make_shared<Options>();
  CLI::App* losses =
      subcommand(*command, "loss", "measure held-out loss by domain, by document and by slice",
                 {"eval loss run --data store"});
  add_common(*losses, *loss);
  losses->add_option("--split", loss->split,
                     "split of the domains to evaluate; default: the sets of the run");
  losses->add_option("--tokens", loss->tokens, "most tokens per set; 0: all")
      ->check(non_negative_number());
  losses->add_option("--documents", loss->documents,
                     "write the losses of single documents to this safetensors file");
  losses->callback([loss] { show_losses(*loss); });
  auto probe = std::make_shared<Options>();
  CLI::App* probes =
      subcommand(*command, "probe",
                 "measure what each mixer does with earlier positions: how many reach a query, "
                 "how evenly, and by content or by position",
                 {"eval probe run --data store"});
  add_common(*probes, *probe);
  probes->add_option("--set", probe->set,
                     "DOMAIN.SPLIT; default: the first that the run was evaluated on");
  probes->add_option("--sequences", probe->sequences, "number of texts, the longest of the set")
      ->capture_default_str()
      ->check(positive_number());
  probes->add_option("--queries", probe->probe.queries, "query positions per text")
      ->capture_default_str()
      ->check(positive_number());
  probes
      ->add_option("--cotangents", probe->probe.cotangents,
                   "random directions of the output per query")
      ->capture_default_str()
      ->check(positive_number());
  probes
      ->add_option("--threshold", probe->probe.threshold,
                   "share of the largest influence above which a position counts as visible")
      ->capture_default_str();
  probes->callback([probe] { show_probe(*probe); });
  for (const std::string& name : eval_commands().names()) eval_commands().at(name)(*command);
}
void add_losses(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* command = subcommand(
      app, "losses", "write the losses of a model on a store, for `assay judge` (JSON Lines)");
  add_common(*command, *o);
  command->add_option("-o,--output", o->output, "file of losses")->required();
  command->add_option("--name", o->name, "name of the model; default: that of its study or folder");
  command->add_option("--tokens", o->trained_tokens, "training tokens; default: those of the run")
      ->check(positive_number());
  command->add_option("--seed", o->seed, "default: that of the run")->check(non_negative_number());
  command->footer(
      "Examples:\n"
      "  assay losses study/runs/window.seed-1.0a1b2c3d --data store -o w.jsonl\n"
      "  assay losses exported/ --data store --tokens 300000000000 -o pythia.jsonl\n");
  command->callback([o] { write_judged_losses(*o); });
}

const bool registered = commands().add("eval", add) && commands().add("losses", add_losses);

}  // namespace
}  // namespace assay::cli
