#include "study/plan_template.h"

#include <algorithm>
#include <tuple>

#include "base/error.h"
#include "study/prepare.h"

namespace assay::study {
namespace {

struct Domain {
  std::string name;
  // tokens; 0 without the split
  int64_t train = 0;
  int64_t valid = 0;
  int64_t test = 0;
  bool trainable() const { return train > 0 && valid > 0; }
};

struct Choice {
  std::vector<Domain> train;
  std::vector<Domain> out_of_domain;
};

// Size of all models of a plan.
struct Size {
  int64_t d_model;
  int64_t num_layers;
  int64_t num_heads;
  int64_t sequence_length;
};

std::vector<Domain> domains_of(const data::TokenStore& store) {
  std::vector<Domain> domains;
  for (const std::string& name : store.domains()) {
    const auto tokens = [&](const char* split) {
      return store.has(name, split) ? store.documents(name, split).tokens() : 0;
    };
    domains.push_back({name, tokens("train"), tokens("valid"), tokens("test")});
  }
  return domains;
}

std::vector<std::string> names_of(const std::vector<Domain>& domains) {
  std::vector<std::string> names;
  for (const Domain& domain : domains) names.push_back(domain.name);
  return names;
}

bool holds(const std::vector<Domain>& domains, const std::string& name) {
  return std::ranges::count(domains, name, &Domain::name) > 0;
}

std::vector<Domain> named(const std::vector<std::string>& names, const std::vector<Domain>& domains,
                          const std::string& store) {
  std::vector<Domain> found;
  for (const std::string& name : names) {
    const auto domain = std::ranges::find(domains, name, &Domain::name);
    if (domain == domains.end())
      fail("{}: no domain '{}'{}\n  Domains: {}. Nothing was written.", store, name,
           did_you_mean(name, names_of(domains)), join(names_of(domains)));
    if (!domain->trainable())
      fail("{}: domain '{}' has no tokens in split {}. Nothing was written.", store, name,
           domain->train > 0 ? "valid" : "train");
    if (holds(found, name)) fail("--train names the domain '{}' twice. Nothing was written.", name);
    found.push_back(*domain);
  }
  return found;
}

std::vector<Domain> testable(const std::vector<Domain>& domains, const std::vector<Domain>& train) {
  std::vector<Domain> found;
  for (const Domain& domain : domains)
    if (domain.test > 0 && !holds(train, domain.name)) found.push_back(domain);
  return found;
}

// The domains with the most training tokens, in the order of the store.
std::vector<Domain> larger_half(const std::vector<Domain>& domains) {
  std::vector<Domain> sorted = domains;
  std::vector<Domain> half;
  std::ranges::sort(sorted, [](const Domain& a, const Domain& b) {
    return std::tie(b.train, a.name) < std::tie(a.train, b.name);
  });
  sorted.resize((sorted.size() + 1) / 2);
  for (const Domain& domain : domains)
    if (holds(sorted, domain.name)) half.push_back(domain);
  return half;
}

Choice choose(const std::vector<Domain>& domains, const std::vector<std::string>& train,
              const std::string& store) {
  Choice choice{named(train, domains, store), {}};
  if (train.empty()) {
    std::ranges::copy_if(domains, std::back_inserter(choice.train), &Domain::trainable);
    if (const auto half = larger_half(choice.train);
        testable(domains, choice.train).empty() && !testable(domains, half).empty())
      choice.train = half;
  }
  if (choice.train.empty())
    fail(
        "{}: no domain has the splits train and valid, which training needs. "
        "Prepare a small corpus with a larger --valid-fraction. Nothing was written.",
        store);
  choice.out_of_domain = testable(domains, choice.train);
  return choice;
}

int64_t training_tokens(const Choice& choice) {
  int64_t tokens = 0;
  for (const Domain& domain : choice.train) tokens += domain.train;
  return tokens;
}

// The longest power of two, at most `wanted`, of which every set holds two sequences.
int64_t sequence_length(const Choice& choice, int64_t wanted) {
  int64_t least = wanted * 2;
  for (const Domain& domain : choice.train) least = std::min({least, domain.train, domain.valid});
  for (const Domain& domain : choice.out_of_domain) least = std::min(least, domain.test);
  while (wanted > 16 && wanted * 2 > least) wanted /= 2;
  return wanted;
}

Size size_of(int64_t budget) {
  if (budget < 4'000'000) return {128, 4, 4, 256};
  if (budget < 40'000'000) return {256, 6, 4, 512};
  return {512, 8, 8, 1024};
}

// A Transformer layer has about 12 d_model² parameters outside its norms, and each token of the
// vocabulary has d_model.
std::string vocabulary_warning(const Size& size, int64_t vocabulary) {
  const int64_t layers = 12 * size.num_layers * size.d_model;
  if (vocabulary <= layers) return "";
  return fmt::format(
      "the vocabulary of {} tokens has {:.0f} % of the parameters of each model, "
      "and about the same share of the training time. "
      "A tokenizer with --vocab {} makes the study faster.",
      vocabulary, 100 * double(vocabulary) / double(vocabulary + layers), layers / 3);
}

// 20480000 as 20_480_000
std::string number(int64_t value) {
  std::string digits = std::to_string(value);
  for (int64_t at = int64_t(digits.size()) - 3; at > 0; at -= 3) digits.insert(size_t(at), "_");
  return digits;
}

std::string list_of(const std::vector<Domain>& domains) {
  std::vector<std::string> quoted;
  for (const Domain& domain : domains) quoted.push_back('"' + domain.name + '"');
  return "[" + join(quoted) + "]";
}

const char* use_of(const Domain& domain, const Choice& choice) {
  if (holds(choice.train, domain.name)) return "trained on";
  if (holds(choice.out_of_domain, domain.name)) return "out of domain";
  if (domain.train > 0 && domain.valid == 0)
    return "none (no split valid; see --valid-fraction of assay data prepare)";
  return "none (no split test)";
}

std::string table_of(const std::vector<Domain>& domains, const Choice& choice) {
  std::string text = fmt::format("#   {:<16} {:>13} {:>13} {:>13}  {}\n", "domain", "train",
                                 "valid", "test", "use");
  for (const Domain& domain : domains) {
    text += fmt::format("#   {:<16} {:>13} {:>13} {:>13}  {}\n", domain.name, number(domain.train),
                        number(domain.valid), number(domain.test), use_of(domain, choice));
  }
  return text;
}

constexpr const char* kText =
    R"(# Which architectures keep the base capabilities of Transformer++ on this store?
#   assay run THIS_FILE -o STUDY --dry-run    # parameters, FLOPs and time; trains nothing
#   assay run THIS_FILE -o STUDY              # trains all models and writes STUDY/report.html
#
# Tokens of the store:
{domains}
reference = "transformer++"                   # every difference is measured against it
models    = ["transformer++", "window", "mamba1"]   # presets: assay list models
seeds     = [1, 2, 3]                         # of every model but the reference
tokens    = [{budget}]                         # training tokens of every model but the reference

# The reference is trained at several budgets, each twice the one before. Other models are
# compared between them. The training text has {available} tokens, so the longest run reads it
# {epochs:.1f} times.
ladder    = {{ tokens = [{rung1}, {rung2}, {rung3}, {rung4}], seeds = [1, 2, 3, 4] }}

# The best of these learning rates is chosen for each model, on held-out loss alone.
tune      = {{ learning_rate = [1e-3, 2e-3, 4e-3], tokens = {rung1} }}

{data_comment}
[data]
store           = {store}
train           = {train}
out_of_domain   = {out_of_domain}
sequence_length = {length}

# All models have this width and depth. --dry-run shows their parameters.
[size]
d_model    = {d_model}
num_layers = {num_layers}
attention  = {{ num_heads = {num_heads} }}

[train]
batch           = {batch}
warmup_fraction = 0.1

# A control: each layer reads 16 tokens at most.
[model.window]
attention = {{ window = 16 }}

[model.mamba1]
num_layers = {mamba_layers}    # a Mamba layer has no feed-forward: two make one Transformer layer

# Your own architecture: add "mine" to models and remove the # signs.
# [model.mine]
# base    = "transformer++"
# pattern = ["mamba1", "mamba1", "attention"]    # repeated over the layers
#
# A class of a Python module needs these two lines in place of that pattern:
# pattern = ["python:MyMixer"]
# python  = "my_mixer.py"                        # next to this file
)";

}  // namespace

NewPlan plan_template(const data::TokenStore& store, const std::vector<std::string>& train) {
  constexpr int64_t kFewest = 819'200;
  constexpr int64_t kMost = 163'840'000;
  constexpr int64_t kBatch = 16;
  const std::vector<Domain> domains = domains_of(store);
  const Choice choice = choose(domains, train, store.folder().string());
  const int64_t available = training_tokens(choice);
  const int64_t top = std::clamp(available, kFewest, kMost);
  const Size size = size_of(top);
  const int64_t length = sequence_length(choice, size.sequence_length);
  const int64_t step = kBatch * length;
  const int64_t rung = std::max<int64_t>(1, top / 8 / step) * step;
  const double epochs = double(8 * rung) / double(available);
  const char* data_comment =
      choice.out_of_domain.empty()
          ? "# No domain is left for testing: the mixed-domain setting, which compares the\n"
            "# held-out loss of the training domains."
          : "# Models never see the domains in out_of_domain during training.";
  using fmt::arg;
  NewPlan plan;
  plan.text = fmt::format(
      fmt::runtime(kText), arg("domains", table_of(domains, choice)),
      arg("budget", number(4 * rung)), arg("available", number(available)), arg("epochs", epochs),
      arg("rung1", number(rung)), arg("rung2", number(2 * rung)), arg("rung3", number(4 * rung)),
      arg("rung4", number(8 * rung)), arg("data_comment", data_comment),
      arg("store", nlohmann::json(store.folder().string()).dump()),
      arg("train", list_of(choice.train)), arg("out_of_domain", list_of(choice.out_of_domain)),
      arg("length", length), arg("d_model", size.d_model), arg("num_layers", size.num_layers),
      arg("num_heads", size.num_heads), arg("batch", kBatch),
      arg("mamba_layers", 2 * size.num_layers));
  if (train.empty())
    for (const Domain& domain : domains)
      if (domain.train > 0 && domain.valid == 0)
        plan.warnings.push_back(
            fmt::format("domain '{}' has training text but no split valid. "
                        "The plan does not train on it. "
                        "Prepare the store again with a larger --valid-fraction.",
                        domain.name));
  if (!store.manifest().contains("synthetic")) {
    plan.warnings.push_back(caution_about(double(8 * rung)));
    plan.warnings.push_back(vocabulary_warning(size, store.vocab_size()));
  }
  plan.warnings.push_back(caution_about_epochs("the longest run of the reference", epochs));
  std::erase(plan.warnings, "");
  return plan;
}

}  // namespace assay::study
