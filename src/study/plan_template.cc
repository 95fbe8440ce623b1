#include "study/plan_template.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/progress.h"

namespace assay::study {
namespace {

constexpr int64_t kEpochs = 4;  // passes over the training text, at most
constexpr int64_t kBatch = 16;

struct Size {
  int64_t d_model, num_layers, num_heads;
  // Of a Transformer with the embedding tied to the head.
  double parameters(int64_t vocabulary) const {
    return 12.0 * double(num_layers * d_model * d_model) + double(vocabulary * d_model);
  }
};
constexpr Size kSizes[] = {{768, 12, 12}, {512, 8, 8}, {256, 6, 4}, {128, 4, 4}, {64, 2, 4}};

struct Split {
  int64_t tokens = 0, documents = 0;
};

// The domains of a store and what a plan does with them.
struct Choice {
  std::vector<std::string> train, out_of_domain;
  std::string held_out, test;
  int64_t train_tokens = 0, train_documents = 0;
  int64_t least_tokens = std::numeric_limits<int64_t>::max();  // of a part that the plan reads
};

Split split_of(const data::TokenStore& store, const std::string& domain, const std::string& split) {
  if (!store.has(domain, split)) return {};
  const data::Documents& documents = store.documents(domain, split);
  return {documents.tokens(), documents.size()};
}

// The split that more domains have; `first` when they are even.
std::string common_split(const data::TokenStore& store, const std::vector<std::string>& domains,
                         const std::string& first, const std::string& second) {
  const auto has = [&](const std::string& split) {
    return std::ranges::count_if(domains, [&](auto& domain) { return split_of(store, domain, split).tokens > 0; });
  };
  return has(second) > has(first) ? second : first;
}

Choice choose(const data::TokenStore& store) {
  Choice choice;
  const std::vector<std::string> domains = store.domains();
  std::vector<std::string> trainable, others;
  for (const std::string& domain : domains)
    (split_of(store, domain, "train").tokens > 0 ? trainable : others).push_back(domain);
  choice.held_out = common_split(store, trainable, "valid", "test");
  choice.test = common_split(store, domains, "test", "valid");
  std::erase_if(trainable, [&](auto& domain) { return split_of(store, domain, choice.held_out).tokens == 0; });
  if (trainable.empty())
    fail("{}: no domain has a split 'train' and a split 'valid' or 'test'. `assay data prepare` makes them with "
         "--valid-fraction. Nothing was written.",
         store.folder().string());
  const auto tokens = [&](const std::string& domain) { return split_of(store, domain, "train").tokens; };
  std::ranges::stable_sort(trainable, std::ranges::greater{}, tokens);
  // Domains without training text are there to be tested on. Without such, the smaller domains are.
  const bool has_others =
      std::ranges::any_of(others, [&](auto& domain) { return split_of(store, domain, choice.test).tokens > 0; });
  const size_t trained = has_others ? trainable.size() : std::max<size_t>(1, trainable.size() / 2);
  choice.train.assign(trainable.begin(), trainable.begin() + std::ptrdiff_t(trained));
  for (const std::string& domain : domains)
    if (!std::ranges::count(choice.train, domain) && split_of(store, domain, choice.test).tokens > 0)
      choice.out_of_domain.push_back(domain);
  for (const std::string& domain : choice.train) {
    const Split train = split_of(store, domain, "train");
    choice.train_tokens += train.tokens;
    choice.train_documents += train.documents;
    choice.least_tokens = std::min({choice.least_tokens, train.tokens,
                                    split_of(store, domain, choice.held_out).tokens});
  }
  for (const std::string& domain : choice.out_of_domain)
    choice.least_tokens = std::min(choice.least_tokens, split_of(store, domain, choice.test).tokens);
  return choice;
}

// The largest power of two that documents and the smallest part fill, at most 1024.
int64_t sequence_length(const Choice& choice) {
  const int64_t document = choice.train_tokens / std::max<int64_t>(1, choice.train_documents);
  int64_t length = 1024;
  while (length > 16 && (length > 2 * document || 4 * length > choice.least_tokens)) length /= 2;
  return length;
}

const Size& size_for(const Choice& choice, int64_t vocabulary) {
  const double most = double(kEpochs * choice.train_tokens) / 5;  // five tokens per parameter or more
  const auto fits = [&](const Size& size) { return size.parameters(vocabulary) <= most; };
  const auto found = std::ranges::find_if(kSizes, fits);
  return found == std::end(kSizes) ? *std::prev(found) : *found;
}

std::string quoted(const std::string& text) { return nlohmann::json(text).dump(); }
std::string list(const std::vector<std::string>& words) {
  std::vector<std::string> out;
  for (const std::string& word : words) out.push_back(quoted(word));
  return "[" + join(out) + "]";
}

std::string table_of_domains(const data::TokenStore& store) {
  std::string text = "# Domains of the store, with the tokens of each split:\n";
  for (const std::string& domain : store.domains()) {
    std::vector<std::string> splits;
    for (const std::string& split : store.splits(domain))
      splits.push_back(fmt::format("{} {}", split, Progress::count(double(split_of(store, domain, split).tokens))));
    text += fmt::format("#   {:<24} {}\n", domain, join(splits));
  }
  return text;
}

}  // namespace

std::string plan_template(const data::TokenStore& store) {
  const Choice choice = choose(store);
  const int64_t length = sequence_length(choice), step = kBatch * length;
  const Size& size = size_for(choice, store.vocab_size());
  const double parameters = size.parameters(store.vocab_size());
  const double wanted = std::min(double(kEpochs * choice.train_tokens), 20 * parameters);
  const int64_t rung = std::max<int64_t>(20, int64_t(wanted / 8 / double(step))) * step;  // an eighth, whole steps
  const auto budget = [&](int64_t eighths) { return fmt::format("{}", eighths * rung); };
  std::string text = fmt::format(
      "# Which architectures keep what Transformer++ learns from {}?\n"
      "#   assay run THIS_FILE -o STUDY --dry-run    # parameters, FLOPs and time of every run\n"
      "#   assay run THIS_FILE -o STUDY\n"
      "# Every key is explained in docs/studies.md.\n#\n",
      choice.out_of_domain.empty() ? "mixed text" : "one kind of text for other kinds");
  text += table_of_domains(store);
  text += fmt::format("#\n# Each model has about {} parameters.\n",
                      Progress::count(parameters));
  text += fmt::format("# The longest runs read the {} training tokens {:.2g} times.\n",
                      Progress::count(double(choice.train_tokens)),
                      double(8 * rung) / double(std::max<int64_t>(1, choice.train_tokens)));
  text +=
      "reference = \"transformer++\"                       # every difference is measured against it\n"
      "models    = [\"transformer++\", \"twin\", \"window\", \"mamba1\"]   # more: assay list models\n"
      "seeds     = [1, 2]                                  # three or four give narrower intervals\n";
  text += fmt::format("tokens    = [{}, {}]    # budgets of every model but the reference\n", budget(4), budget(8));
  text += fmt::format("ladder    = {{ tokens = [{}, {}, {}, {}], seeds = [1, 2, 3, 4] }}   # budgets of the reference\n",
                      budget(1), budget(2), budget(4), budget(8));
  text += fmt::format("tune      = {{ learning_rate = [1e-3, 2e-3, 4e-3], tokens = {} }}   # chosen for each model\n",
                      budget(1));
  text += fmt::format("train     = {{ batch = {}, warmup_fraction = 0.1 }}\n", kBatch);
  text += fmt::format("size      = {{ d_model = {}, num_layers = {}, attention = {{ num_heads = {} }} }}\n\n",
                      size.d_model, size.num_layers, size.num_heads);
  text += "[data]\n";
  text += fmt::format("store           = {}\n", quoted(fs::absolute(store.folder()).lexically_normal().string()));
  text += fmt::format("train           = {}    # models are trained on these domains\n", list(choice.train));
  text += choice.out_of_domain.empty()
              ? "out_of_domain   = []    # the store has one domain: models are compared on its held-out text\n"
              : fmt::format("out_of_domain   = {}    # and tested on these, never trained on\n",
                            list(choice.out_of_domain));
  text += fmt::format("sequence_length = {}\n", length);
  text += fmt::format("held_out        = {}    # split of the training domains\n", quoted(choice.held_out));
  text += fmt::format("test            = {}    # split of the other domains\n\n", quoted(choice.test));
  text += fmt::format(
      "[model.twin]                 # the reference again: no difference must be found\n"
      "base   = \"transformer++\"\nseeds  = [11, 12]\ntokens = [{}]\n\n"
      "[model.window]               # a control: it cannot read far back\n"
      "attention = {{ window = {} }}\n\n"
      "[model.mamba1]\n"
      "num_layers = {}               # a Mamba layer has no feed-forward: two make one Transformer layer\n",
      budget(8), std::max<int64_t>(4, length / 8), 2 * size.num_layers);
  return text;
}

}  // namespace assay::study
