// assay data prepare | synth | adopt | info | overlap | verify
#include <nlohmann/json.hpp>

#include "base/config.h"
#include "base/progress.h"
#include "cli/command.h"
#include "data/adopt.h"
#include "data/overlap.h"
#include "data/prepare.h"
#include "data/synthetic.h"
#include "data/token_store.h"

namespace assay::cli {
namespace {

using nlohmann::json;

struct Options {
  std::string store;
  std::string other_store;
  std::string tokenizer;
  std::vector<std::string> files;
  std::vector<std::string> domains;
  data::PrepareOptions prepare;
  data::SyntheticOptions synthetic;
  data::OverlapOptions overlap;
  bool overwrite = false;
};

json describe(const data::TokenStore& store) {
  json parts = json::array();
  for (const std::string& domain : store.domains())
    for (const std::string& split : store.splits(domain)) {
      const data::Documents& documents = store.documents(domain, split);
      json part = {{"domain", domain},
                   {"split", split},
                   {"documents", documents.size()},
                   {"tokens", documents.tokens()}};
      part["bytes"] = documents.has_bytes() ? json(documents.bytes()) : json();
      part["sources"] = documents.has_sources() ? json(documents.source_names().size()) : json();
      parts.push_back(std::move(part));
    }
  const data::TokenizerInfo& tokenizer = store.tokenizer();
  return {{"store", store.folder().string()},
          {"fingerprint", store.fingerprint()},
          {"tokenizer",
           {{"kind", tokenizer.kind},
            {"sha256", tokenizer.sha256},
            {"vocab_size", tokenizer.vocab_size},
            {"separator", tokenizer.separator}}},
          {"parts", std::move(parts)}};
}

std::string as_table(const json& info) {
  std::string text = fmt::format(
      "{}   tokenizer {} of {} pieces   fingerprint {:.16}\n"
      "{:<16} {:<8} {:>12} {:>9} {:>16} {:>18} {:>12}\n",
      info["store"].get<std::string>(), info["tokenizer"]["kind"].get<std::string>(),
      info["tokenizer"]["vocab_size"].get<int64_t>(), info["fingerprint"].get<std::string>(),
      "domain", "split", "documents", "sources", "tokens", "bytes of text", "bytes/token");
  for (const json& part : info["parts"]) {
    const auto tokens = part["tokens"].get<int64_t>();
    const bool known = !part["bytes"].is_null() && tokens;
    text += fmt::format(
        "{:<16} {:<8} {:>12} {:>9} {:>16} {:>18} {:>12}\n", part["domain"].get<std::string>(),
        part["split"].get<std::string>(), part["documents"].get<int64_t>(),
        part["sources"].is_null() ? "none" : part["sources"].dump(), tokens,
        known ? part["bytes"].dump() : "unknown",
        known ? fmt::format("{:.3f}", part["bytes"].get<double>() / double(tokens)) : "");
  }
  return text;
}

void prepare(Options options) {
  for (const std::string& domain : options.domains) {
    const size_t equals = domain.find('=');
    if (equals == 0 || equals == std::string::npos)
      fail("--domain '{}': NAME=GLOB was expected", domain);
    options.prepare.domains.emplace_back(domain.substr(0, equals), domain.substr(equals + 1));
  }
  options.prepare.inputs.assign(options.files.begin(), options.files.end());
  options.prepare.store = options.store;
  options.prepare.tokenizer = options.tokenizer;
  options.prepare.overwrite = options.overwrite;
  const json report = data::prepare(options.prepare);
  json info = describe(data::TokenStore(options.store));
  std::string text = as_table(info);
  constexpr int64_t kMostLines = 20;
  int64_t files = 0;
  for (const json& source : report["sources"])
    if (source.contains("left_out") && ++files <= kMostLines)
      text += fmt::format("{}: left out {}\n", source["file"].get<std::string>(),
                          source["left_out"].get<std::string>());
  if (files > kMostLines)
    text += fmt::format("{} more files of which something was left out (manifest.json has all)\n",
                        files - kMostLines);
  const double seconds = report["total"]["seconds"];
  if (report.contains("warnings"))
    for (const json& warning : report["warnings"])
      text += "warning: " + warning.get<std::string>() + "\n";
  text += fmt::format("{} documents, {:.1f} MB of text in {:.1f} s ({:.1f} MB/s)\n",
                      report["total"]["documents"].get<int64_t>(),
                      report["total"]["bytes"].get<double>() / 1e6, seconds,
                      report["total"]["bytes"].get<double>() / 1e6 / seconds);
  info.update(report);
  print(info, text);
}

void synth(const Options& options) {
  data::synthesize(options.store, options.synthetic, options.overwrite);
  const data::TokenStore store(options.store);
  json info = describe(store);
  info["synthetic"] = store.manifest()["synthetic"];
  std::string text =
      as_table(info) + "loss of a predictor that knows set and table, nats per token:";
  for (const auto& [name, loss] : info["synthetic"]["oracle_loss"].items())
    text += fmt::format(" {} {:.4f}", name, loss.get<double>());
  print(info, text + "\n");
}

void adopt(const Options& options) {
  const int64_t left_out = data::adopt({.files = {options.files.begin(), options.files.end()},
                                        .tokenizer = options.tokenizer,
                                        .store = options.store,
                                        .overwrite = options.overwrite});
  json info = describe(data::TokenStore(options.store));
  info["left_out"] = left_out;
  std::string text = as_table(info);
  if (left_out > 0)
    text += fmt::format("left out: {} without a token\n", counted(left_out, "document"));
  print(info, text);
}

void info(const Options& options) {
  const json info = describe(data::TokenStore(options.store));
  print(info, as_table(info));
}

void overlap(const Options& options) {
  const data::TokenStore train(options.store);
  const data::TokenStore test(options.other_store.empty() ? options.store : options.other_store);
  json domains = json::array();
  std::string text = fmt::format("{:<16} {:>12} {:>12} {:>16} {:>16} {:>9}\n", "test domain",
                                 "documents", "duplicates", "n-grams", "in training", "share");
  for (const data::DomainOverlap& domain : data::overlap(train, test, options.overlap)) {
    domains.push_back({{"domain", domain.domain},
                       {"documents", domain.documents},
                       {"duplicates", domain.duplicates},
                       {"ngrams", domain.ngrams},
                       {"shared", domain.shared},
                       {"share", domain.ngram_share()}});
    text += fmt::format("{:<16} {:>12} {:>12} {:>16} {:>16} {:>9}\n", domain.domain,
                        domain.documents, domain.duplicates, domain.ngrams, domain.shared,
                        domain.ngrams ? fmt::format("{:.3f}%", 100 * domain.ngram_share()) : "-");
  }
  print({{"train", train.folder().string()},
         {"test", test.folder().string()},
         {"train_split", options.overlap.train_split},
         {"test_split", options.overlap.test_split},
         {"n", options.overlap.n},
         {"domains", std::move(domains)}},
        text);
}

void verify(const Options& options) {
  const data::TokenStore store(options.store);
  store.verify();
  print({{"store", options.store}, {"verified", true}, {"fingerprint", store.fingerprint()}},
        fmt::format("{}: every file matches its checksum (fingerprint {:.16})\n", options.store,
                    store.fingerprint()));
}

void add_prepare(CLI::App& data, std::shared_ptr<Options> options) {
  CLI::App* command =
      subcommand(data, "prepare", "convert text to a token store",
                 {"data prepare --tokenizer t.model -o store corpus/ --domain 'web=*/web/*'"});
  command
      ->add_option("FILE", options->files,
                   "JSON Lines or text, plain, .zst or .gz; folders are searched")
      ->required();
  command->add_option("--tokenizer", options->tokenizer, "SentencePiece model")->required();
  command->add_option("-o,--output", options->store, "the store to write")->required();
  command->add_option("--domain", options->domains,
                      "NAME=GLOB: files that match are of this domain (may be repeated)");
  command->add_option(
      "--field", options->prepare.field,
      "field that names the domain of a document, a.b for nested ones [meta.redpajama_set_name]");
  command
      ->add_option("--source-field", options->prepare.source_field,
                   "field that names the source of a document; '' stores no sources")
      ->capture_default_str();
  command
      ->add_option("--valid-fraction", options->prepare.valid_fraction,
                   "share of the training documents that is moved to split valid")
      ->capture_default_str();
  command
      ->add_option("--threads", options->prepare.threads,
                   "threads that tokenize, at most 1024; 0: one per core")
      ->capture_default_str();
  command->add_flag("--overwrite", options->overwrite, "replace an existing token store");
  command->callback([=] { prepare(*options); });
}

void add_synth(CLI::App& data, std::shared_ptr<Options> options) {
  CLI::App* command = subcommand(data, "synth", "write synthetic domains with a known truth",
                                 {"data synth -o store"});
  command->add_option("-o,--output", options->store, "the store to write")->required();
  options->synthetic.fields([&](std::string name, auto& value, const char* what = "") {
    std::replace(name.begin(), name.end(), '_', '-');
    command->add_option("--" + name, value, what)->capture_default_str();
  });
  command->add_flag("--overwrite", options->overwrite, "replace an existing token store");
  command->callback([=] { synth(*options); });
}

void add_adopt(CLI::App& data, std::shared_ptr<Options> options) {
  CLI::App* command =
      subcommand(data, "adopt", "make a token store from .bin/.idx files that Megatron-LM wrote",
                 {"data adopt web.train.idx --tokenizer t.model -o store"});
  command
      ->add_option("FILE.idx", options->files,
                   "DOMAIN.SPLIT.idx, with its .bin file in the same folder")
      ->required();
  command
      ->add_option("--tokenizer", options->tokenizer,
                   "SentencePiece model with which they were written")
      ->required();
  command->add_option("-o,--output", options->store, "the store to write")->required();
  command->add_flag("--overwrite", options->overwrite, "replace an existing token store");
  command->callback([=] { adopt(*options); });
}

void add_overlap(CLI::App& data, std::shared_ptr<Options> options) {
  CLI::App* command =
      subcommand(data, "overlap",
                 "measure the share of test n-grams and documents that occur in the training text",
                 {"data overlap store"});
  command->add_option("STORE_A", options->store, "token store of the training text")->required();
  command->add_option("STORE_B", options->other_store, "token store of the test text [STORE_A]");
  command->add_option("--train-split", options->overlap.train_split, "split of the training text")
      ->capture_default_str();
  command->add_option("--test-split", options->overlap.test_split, "split of the test text")
      ->capture_default_str();
  command->add_option("-n,--ngram", options->overlap.n, "tokens per n-gram")->capture_default_str();
  command->callback([=] { overlap(*options); });
}

void add(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* data = app.add_subcommand("data", "make, inspect and check token stores");
  data->require_subcommand(1);
  add_prepare(*data, options);
  add_synth(*data, options);
  add_adopt(*data, options);
  add_overlap(*data, options);
  CLI::App* command = subcommand(*data, "info", "show documents, tokens and bytes of a token store",
                                 {"data info store"});
  command->add_option("STORE", options->store, "token store")->required();
  command->callback([=] { info(*options); });
  command = subcommand(*data, "verify", "check every file of a store against its checksum",
                       {"data verify store"});
  command->add_option("STORE", options->store, "token store")->required();
  command->callback([=] { verify(*options); });
}
[[maybe_unused]] const bool registered = commands().add("data", add);

}  // namespace
}  // namespace assay::cli
