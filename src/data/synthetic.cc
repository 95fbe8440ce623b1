#include "data/synthetic.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "base/config.h"
#include "base/error.h"
#include "base/interrupt.h"
#include "base/random.h"
#include "data/store_writer.h"

namespace assay::data {
namespace {

using ActiveSet = std::vector<int32_t>;  // by rank

class Recipe {
 public:
  explicit Recipe(const SyntheticOptions& options) : options_(options) {
    for (int64_t rank = 1; rank <= options.active; ++rank)
      weights_.push_back(std::pow(double(rank), -options.zipf));
    const double total = std::accumulate(weights_.begin(), weights_.end(), 0.0);
    for (double& weight : weights_) weight /= total;
    for (int64_t i = 0; i < options.known_sets; ++i)
      known_.push_back(draw_set(random("known set", i)));
  }
  Random random(std::string_view name, int64_t step) const {
    return {uint64_t(options_.seed), name, uint64_t(step)};
  }
  const ActiveSet& known_set(uint64_t i) const { return known_[i]; }

  ActiveSet draw_set(Random random) const {
    ActiveSet set;
    while (int64_t(set.size()) < options_.active)
      if (const int32_t token = draw_content(random);
          std::find(set.begin(), set.end(), token) == set.end())
        set.push_back(token);
    return set;
  }
  // Domain-specific; entry 0 is never used
  std::vector<int32_t> bigram_table(const std::string& domain) const {
    Random random = this->random("bigram table " + domain, 0);
    std::vector<int32_t> table(size_t(options_.vocabulary));
    for (int32_t& token : table) token = draw_content(random);
    return table;
  }
  // Returns −ln p of the document under the recipe, given set and table.
  double draw_document(const ActiveSet& set, const std::vector<int32_t>& table, Random& random,
                       std::vector<int32_t>& tokens) const {
    double surprise = 0;
    tokens.clear();
    for (int64_t t = 0; t + 1 < options_.document_length; ++t) {
      const bool follow = t && random.uniform() < options_.bigram;
      tokens.push_back(follow ? table[size_t(tokens.back())] : set[draw_rank(random.uniform())]);
      surprise -= std::log(probability(set, table, tokens));
    }
    return surprise;
  }

 private:
  int32_t draw_content(Random& random) const {
    return int32_t(1 + random.below(uint64_t(options_.vocabulary - 1)));
  }
  size_t draw_rank(double u) const {
    size_t rank = 0;
    while (rank + 1 < weights_.size() && u >= weights_[rank]) u -= weights_[rank++];
    return rank;
  }
  double probability(const ActiveSet& set, const std::vector<int32_t>& table,
                     const std::vector<int32_t>& tokens) const {
    const auto rank = size_t(std::find(set.begin(), set.end(), tokens.back()) - set.begin());
    const double from_set = rank < set.size() ? weights_[rank] : 0;
    if (tokens.size() == 1) return from_set;
    const bool follows = table[size_t(tokens[tokens.size() - 2])] == tokens.back();
    return (1 - options_.bigram) * from_set + (follows ? options_.bigram : 0);
  }

  SyntheticOptions options_;
  std::vector<double> weights_;
  std::vector<ActiveSet> known_;
};

void check(const SyntheticOptions& o) {
  if (o.vocabulary < 3 || o.vocabulary > 65536)
    fail("vocabulary is {}; 3 … 65536 was expected", o.vocabulary);
  if (o.active < 1 || o.active >= o.vocabulary)
    fail("active is {}; 1 … vocabulary − 1 = {} was expected", o.active, o.vocabulary - 1);
  if (o.document_length < 2)
    fail("document_length is {}; at least 2 was expected", o.document_length);
  if (o.documents < 1 || o.held_out < 1)
    fail("documents is {} and held_out {}; both must be at least 1", o.documents, o.held_out);
  if (o.known_sets < 1) fail("known_sets is {}; at least 1 was expected", o.known_sets);
  if (!(o.known >= 0 && o.known <= 1 && o.bigram >= 0 && o.bigram <= 1))
    fail("known and bigram are shares, 0 … 1");
  if (!(o.zipf >= 0 && o.zipf <= 100)) fail("zipf is {}; 0 … 100 was expected", o.zipf);
}

struct Domain {
  const char* name;
  bool known;
};
constexpr Domain kDomains[] = {{"fresh_a", false},
                               {"fresh_b", false},
                               {"fresh_c", false},
                               {"known_a", true},
                               {"known_b", true}};

// Returns the mean −ln p a content token.
double write_split(StoreWriter& writer, const Recipe& recipe, const SyntheticOptions& options,
                   const Domain& domain, const std::string& split) {
  const int64_t documents = split == "train" ? options.documents : options.held_out;
  const auto table = recipe.bigram_table(domain.name);
  const std::string name = std::string(domain.name) + "." + split;
  std::vector<int32_t> tokens;
  double surprise = 0;
  for (int64_t i = 0; i < documents; ++i) {
    check_interrupt();
    Random random = recipe.random(name, i);
    const bool known = domain.known && random.uniform() < options.known;
    const ActiveSet set = known ? recipe.known_set(random.below(uint64_t(options.known_sets)))
                                : recipe.draw_set(recipe.random(name + " set", i));
    surprise += recipe.draw_document(set, table, random, tokens);
    writer.add(domain.name, split, tokens, int64_t(tokens.size()));
  }
  return surprise / double(documents * (options.document_length - 1));
}

}  // namespace

void synthesize(const fs::path& store, SyntheticOptions options, bool overwrite) {
  check(options);
  const Recipe recipe(options);
  StoreWriter writer(store, {"none", "", options.vocabulary, 0}, overwrite);
  nlohmann::json note;
  for (const Field& field : fields_of(options))
    std::visit([&](auto* value) { note["options"][field.name] = *value; }, field.value);
  for (const Domain& domain : kDomains)
    for (const char* split : {"train", "valid", "test"})
      if (domain.known || std::string(split) != "train")
        note["oracle_loss"][std::string(domain.name) + "." + split] =
            write_split(writer, recipe, options, domain, split);
  writer.note("synthetic", std::move(note));
  writer.commit();
}

}  // namespace assay::data
