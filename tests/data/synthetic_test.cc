#include "data/synthetic.h"

#include <cmath>
#include <map>
#include <set>

#include "data/token_store.h"
#include "folder.h"

namespace assay::data {
namespace {

SyntheticOptions small() { return {.seed = 5, .documents = 400, .held_out = 50}; }

// Its active set, almost surely
std::set<int64_t> frequent_tokens(const Tokens& document, int64_t count) {
  std::map<int64_t, int64_t> counts;
  for (int64_t i = 0; i + 1 < document.size(); ++i) ++counts[document[i]];
  std::multimap<int64_t, int64_t> by_count;
  for (const auto& [token, n] : counts) by_count.emplace(-n, token);
  std::set<int64_t> set;
  for (const auto& [n, token] : by_count)
    if (int64_t(set.size()) < count) set.insert(token);
  return set;
}

int64_t in_common(const std::set<int64_t>& a, const std::set<int64_t>& b) {
  int64_t count = 0;
  for (const int64_t token : a) count += int64_t(b.count(token));
  return count;
}

// The share of documents that have nearly the set of another one.
double share_with_a_twin(const Documents& documents) {
  std::vector<std::set<int64_t>> sets;
  for (int64_t i = 0; i < documents.size(); ++i)
    sets.push_back(frequent_tokens(documents.document(i), 12));
  int64_t twins = 0;
  for (size_t i = 0; i < sets.size(); ++i)
    for (size_t j = 0; j < sets.size(); ++j)
      if (i != j && in_common(sets[i], sets[j]) >= 9) {
        ++twins;
        break;
      }
  return double(twins) / double(sets.size());
}

TEST(Synthetic, IsDeterministicAndDependsOnTheSeed) {
  const Folder a;
  const Folder b;
  const Folder c;
  synthesize(a / "store", small());
  synthesize(b / "store", small());
  auto other = small();
  other.seed = 6;
  synthesize(c / "store", other);
  EXPECT_EQ(TokenStore(a / "store").fingerprint(), TokenStore(b / "store").fingerprint());
  EXPECT_NE(TokenStore(a / "store").fingerprint(), TokenStore(c / "store").fingerprint());
}

TEST(Synthetic, HasTheDomainsAndSplits) {
  const Folder folder;
  synthesize(folder / "store", small());
  const TokenStore store(folder / "store");
  EXPECT_EQ(store.domains(),
            (std::vector<std::string>{"fresh_a", "fresh_b", "fresh_c", "known_a", "known_b"}));
  EXPECT_EQ(store.splits("known_a"), (std::vector<std::string>{"test", "train", "valid"}));
  EXPECT_EQ(store.splits("fresh_a"), (std::vector<std::string>{"test", "valid"}));
  const Documents& train = store.documents("known_a", "train");
  EXPECT_EQ(train.size(), 400);
  EXPECT_EQ(train.tokens(), 400 * 256);
  EXPECT_EQ(train.bytes(3), 255);
  for (int64_t i = 0; i < train.size(); ++i)
    for (int64_t t = 0; t < 256; ++t)
      ASSERT_EQ(train.document(i)[t] == 0, t == 255) << "document " << i << " token " << t;
  store.verify();
}

TEST(Synthetic, HalfOfTheTrainingDocumentsShareKnownSets) {
  const Folder folder;
  synthesize(folder / "store", small());
  const TokenStore store(folder / "store");
  // 4 standard deviations
  EXPECT_NEAR(share_with_a_twin(store.documents("known_a", "train")), 0.5, 0.1);
  EXPECT_LT(share_with_a_twin(store.documents("fresh_a", "test")), 0.05);
}

TEST(Synthetic, OneTokenInTenFollowsTheTableOfItsDomain) {
  const Folder folder;
  auto options = small();
  options.documents = 4000;
  synthesize(folder / "store", options);
  const TokenStore store(folder / "store");
  // The most frequent successor beyond chance
  std::map<std::string, std::map<int64_t, int64_t>> table;
  double share = 0;
  for (const std::string& domain : {"known_a", "known_b"}) {
    const Tokens stream = store.documents(domain, "train").stream();
    std::map<int64_t, std::map<int64_t, int64_t>> pairs;
    for (int64_t i = 0; i + 1 < stream.size(); ++i)
      if (stream[i] && stream[i + 1]) ++pairs[stream[i]][stream[i + 1]];
    int64_t follow = 0;
    int64_t all = 0;
    for (const auto& [previous, next] : pairs) {
      int64_t best = 0;
      for (const auto& [token, count] : next) {
        all += count;
        if (count > best) {
          best = count;
          table[domain][previous] = token;
        }
      }
      follow += best;
    }
    share = double(follow) / double(all);
    EXPECT_NEAR(share, 0.1, 0.02) << domain;  // a few come by the sets
  }
  int64_t equal = 0;
  for (const auto& [previous, next] : table["known_a"]) equal += table["known_b"][previous] == next;
  EXPECT_LT(equal, 25);
}

TEST(Synthetic, OracleLossIsTheEntropyOfTheRecipe) {
  const Folder folder;
  auto options = small();
  options.bigram = 0;
  synthesize(folder / "store", options);
  double total = 0;
  double entropy = 0;
  for (int rank = 1; rank <= 12; ++rank) total += 1 / std::sqrt(rank);
  for (int rank = 1; rank <= 12; ++rank)
    entropy -= std::log(1 / std::sqrt(rank) / total) / std::sqrt(rank) / total;
  const auto losses = TokenStore(folder / "store").manifest().at("synthetic").at("oracle_loss");
  EXPECT_NEAR(losses.at("known_a.train").get<double>(), entropy, 0.01);
  EXPECT_NEAR(losses.at("fresh_c.test").get<double>(), entropy, 0.03);
}

TEST(Synthetic, RefusesWhatCannotBe) {
  const Folder folder;
  auto refuse = [&](auto change) {
    auto options = small();
    change(options);
    EXPECT_THROW(synthesize(folder / "store", options), BadInput);
  };
  refuse([](auto& o) { o.active = 256; });
  refuse([](auto& o) { o.documents = 0; });
  refuse([](auto& o) { o.document_length = 1; });
  refuse([](auto& o) { o.bigram = 1.5; });
  refuse([](auto& o) { o.vocabulary = 2; });
  refuse([](auto& o) { o.known_sets = 0; });
  EXPECT_EQ(folder.entries(), 0);
}

}  // namespace
}  // namespace assay::data
