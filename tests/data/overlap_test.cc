#include "data/overlap.h"

#include "base/random.h"
#include "data/store_writer.h"
#include "folder.h"

namespace assay::data {
namespace {

using Texts = std::vector<std::pair<std::string, std::vector<int32_t>>>;  // "domain.split", tokens

fs::path store_of(const fs::path& path, const Texts& texts,
                  const TokenizerInfo& tokenizer = {"none", "", 60'000, 0}) {
  StoreWriter writer(path, tokenizer);
  for (const auto& [name, tokens] : texts) {
    const size_t dot = name.find('.');
    writer.add(name.substr(0, dot), name.substr(dot + 1), tokens, int64_t(tokens.size()));
  }
  writer.commit();
  return path;
}

std::vector<int32_t> random_tokens(uint64_t seed, size_t size) {
  Random random(seed, "tokens");
  std::vector<int32_t> tokens(size);
  for (int32_t& token : tokens) token = int32_t(1 + random.below(50'000));
  return tokens;
}

std::vector<int32_t> joined(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST(Overlap, CountsDocumentsAndNgrams) {
  const Folder folder;
  const auto a = random_tokens(1, 100);
  const auto b = random_tokens(2, 100);
  const auto c = random_tokens(3, 100);
  const std::vector<int32_t> piece(a.begin() + 40, a.begin() + 60);  // 20 tokens hold 8 13-grams
  const TokenStore store(store_of(folder / "s", {{"web.train", a},
                                                 {"code.train", b},
                                                 {"web.test", a},  // a duplicate
                                                 // Takes 8 n-grams over
                                                 {"web.test", joined(c, piece)},
                                                 {"book.test", c},
                                                 // Shorter than an n-gram
                                                 {"book.test", random_tokens(4, 12)}}));
  const auto result = overlap(store, store);
  ASSERT_EQ(result.size(), 2u);
  EXPECT_EQ(result[0].domain, "book");
  EXPECT_EQ(result[0].documents, 2);
  EXPECT_EQ(result[0].duplicates, 0);
  EXPECT_EQ(result[0].ngrams, 88);
  EXPECT_EQ(result[0].shared, 0);
  EXPECT_EQ(result[1].documents, 2);
  EXPECT_EQ(result[1].duplicates, 1);
  EXPECT_EQ(result[1].ngrams, 88 + 108);
  EXPECT_EQ(result[1].shared, 88 + 8);
}

TEST(Overlap, OnlyTheGivenTrainingDomainsCount) {
  const Folder folder;
  const auto a = random_tokens(1, 100);
  const auto b = random_tokens(2, 100);
  const TokenStore store(store_of(
      folder / "s", {{"web.train", a}, {"code.train", b}, {"web.test", a}, {"web.test", b}}));
  const auto all = overlap(store);
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].duplicates, 2);
  EXPECT_EQ(all[0].document_share(), 1);
  const auto limited =
      overlap(store, OverlapOptions{.train_domains = {"web"}, .show_progress = false});
  EXPECT_EQ(limited[0].duplicates, 1);
  EXPECT_EQ(limited[0].document_share(), 0.5);
  EXPECT_EQ(limited[0].ngram_share(), 0.5);
  EXPECT_MESSAGE(overlap(store, OverlapOptions{.train_domains = {"wob"}}), "did you mean 'web'?");
}

TEST(Overlap, FindsNgramsOfAnyLength) {
  const Folder folder;
  const auto a = random_tokens(1, 200);
  const TokenStore store(
      store_of(folder / "s",
               {{"web.train", a},
                {"web.test", joined(random_tokens(2, 100), {a.begin() + 3, a.begin() + 103})}}));
  for (const int64_t n : {1, 2, 63, 64, 65, 100}) {
    const auto result = overlap(store, store, {.n = n});
    EXPECT_EQ(result[0].ngrams, 200 - n + 1) << n;
    EXPECT_GE(result[0].shared, 100 - n + 1) << n;
    if (n > 1) EXPECT_EQ(result[0].shared, 100 - n + 1) << n;
  }
}

TEST(Overlap, RunsOfDifferentTokensShareNothing) {
  const Folder folder;
  auto run = [](std::vector<int32_t> period) {
    std::vector<int32_t> tokens(400);
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = period[i % period.size()];
    return tokens;
  };
  const TokenStore store(store_of(folder / "s", {{"web.train", run({1})},
                                                 {"web.train", run({2, 3})},
                                                 {"web.test", run({4})},
                                                 {"web.test", run({5, 6, 7, 8})}}));
  for (const int64_t n : {13, 32, 63, 64, 65, 128, 256, 399})
    EXPECT_EQ(overlap(store, store, {.n = n})[0].shared, 0) << n;
}

TEST(Overlap, IdsOutsideTheVocabularyAreRejected) {
  for (const char* damaged : {"web.train.bin", "web.test.bin"}) {
    const Folder folder;
    store_of(folder / "s",
             {{"web.train", random_tokens(1, 50)}, {"web.test", random_tokens(2, 50)}});
    std::string tokens = read_file((folder / "s") / damaged);
    tokens[60] = tokens[61] = '\xff';  // 65535 in a vocabulary of 60000
    folder.write(std::string("s/") + damaged, tokens);
    const TokenStore store(folder / "s");
    EXPECT_MESSAGE(overlap(store), "65535") << damaged;
  }
}

TEST(Overlap, DoesNotJoinDocuments) {
  const Folder folder;
  const auto a = random_tokens(1, 20);
  const TokenStore store(store_of(folder / "s", {{"web.train", {a.begin(), a.begin() + 10}},
                                                 {"web.train", {a.begin() + 10, a.end()}},
                                                 {"web.test", a}}));
  EXPECT_EQ(overlap(store, store)[0].shared, 0);
  EXPECT_EQ(overlap(store, store, {.n = 10})[0].shared, 2);
}

TEST(Overlap, OrderOfTokensMatters) {
  const Folder folder;
  const TokenStore store(store_of(
      folder / "s",
      {{"web.train", {1, 2, 3, 3}}, {"web.test", {2, 1, 3, 3}}, {"web.test", {3, 3, 1, 2}}}));
  EXPECT_EQ(overlap(store, store, {.n = 4})[0].shared, 0);
  EXPECT_EQ(overlap(store, store, {.n = 2})[0].shared, 3);
}

TEST(Overlap, ComparesTwoStoresOfOneTokenizer) {
  const Folder folder;
  const auto a = random_tokens(1, 50);
  const TokenStore train(store_of(folder / "train", {{"web.train", a}}));
  const TokenStore test(store_of(folder / "test", {{"blog.valid", a}}));
  EXPECT_EQ(overlap(train, test, {.test_split = "valid"})[0].duplicates, 1);
  EXPECT_MESSAGE(overlap(train, test), "no domain has a split 'test'");
  const TokenStore other(store_of(folder / "other", {{"web.test", a}}, {"none", "abc", 60'000, 0}));
  EXPECT_MESSAGE(overlap(train, other), "different tokenizers");
  EXPECT_MESSAGE(overlap(train, test, {.n = 0}), "n-grams of 0 tokens");
}

}  // namespace
}  // namespace assay::data
