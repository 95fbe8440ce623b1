#include "data/sampler.h"

#include <map>
#include <numeric>
#include <set>

#include "data/store_writer.h"
#include "folder.h"

namespace assay::data {
namespace {

// Domains whose stream is 1, 2, 3, … so that a token tells its place.
fs::path counting_store(const Folder& folder,
                        const std::vector<std::pair<std::string, int64_t>>& domains) {
  StoreWriter writer(folder / "store", {"none", "", 100'000, 0});
  for (const auto& [name, tokens] : domains) {
    std::vector<int32_t> stream(size_t(tokens - 1));
    std::iota(stream.begin(), stream.end(), 1);
    writer.add(name, "train", stream, tokens);
  }
  writer.commit();
  return folder / "store";
}

TEST(Sampler, SeesEveryBlockOnceAnEpoch) {
  const Folder folder;
  const TokenStore store(counting_store(folder, {{"a", 1000}}));
  const Sampler sampler(store, {.sequence_length = 7, .seed = 3});
  const int64_t blocks = sampler.blocks(0);
  EXPECT_EQ(blocks, (1000 - 7) / 7);
  std::map<int64_t, std::multiset<int64_t>> offsets;
  for (int64_t n = 0; n < 1024 * 10; ++n) {
    const auto place = sampler.place(n);
    offsets[place.epoch].insert(place.offset);
    ASSERT_LE(place.offset + 8, 1000) << n;
  }
  ASSERT_GT(offsets.size(), 50u);
  std::set<int64_t> shifts;
  for (int64_t epoch = 0; epoch < 50; ++epoch) {
    const int64_t shift = *offsets[epoch].begin();
    shifts.insert(shift);
    std::multiset<int64_t> expected;
    for (int64_t i = 0; i < blocks; ++i) expected.insert(shift + 7 * i);
    EXPECT_EQ(offsets[epoch], expected) << "epoch " << epoch;
  }
  EXPECT_EQ(*offsets[0].begin(), 0);
  EXPECT_EQ(shifts, (std::set<int64_t>{0, 1, 2, 3, 4, 5, 6}));
}

TEST(Sampler, IsAPureFunctionOfTheSampleNumber) {
  const Folder folder;
  const TokenStore store(counting_store(folder, {{"a", 5000}, {"b", 3000}}));
  const Sampler one(store, {.sequence_length = 16, .seed = 1});
  const Sampler same(store, {.sequence_length = 16, .seed = 1});
  const Sampler other(store, {.sequence_length = 16, .seed = 2});
  std::vector<int64_t> a(4 * 17);
  std::vector<int64_t> b(4 * 17);
  std::vector<int64_t> c(4 * 17);
  std::vector<int64_t> d(8 * 17);
  one.batch(0, 4, a.data());
  one.batch(9, 4, a.data());
  same.batch(9, 4, b.data());
  other.batch(9, 4, c.data());
  EXPECT_EQ(a, b);
  EXPECT_NE(a, c);
  one.batch(4, 8, d.data());  // samples 32 … 39 hold 36 … 39
  EXPECT_TRUE(std::equal(a.begin(), a.end(), d.begin() + 4 * 17));
}

TEST(Sampler, GivesBlocksOfTheStream) {
  const Folder folder;
  const TokenStore store(counting_store(folder, {{"a", 500}}));
  const Sampler sampler(store, {.sequence_length = 16});
  std::vector<int64_t> tokens(17);
  for (int64_t n = 0; n < 20; ++n) {
    sampler.sample(n, tokens.data());
    for (int64_t i = 0; i < 17; ++i)
      EXPECT_EQ(tokens[size_t(i)], (sampler.place(n).offset + i + 1) % 500);
  }
}

TEST(Sampler, MixesDomainsExactlyInEveryPeriod) {
  const Folder folder;
  const TokenStore store(counting_store(folder, {{"a", 60'000}, {"b", 30'000}, {"c", 40}}));
  const Sampler by_size(store, {.sequence_length = 16});
  EXPECT_EQ(by_size.proportions(), (std::vector<double>{682. / 1024, 341. / 1024, 1. / 1024}));
  const Sampler given(store, {.domains = {"c", "b"}, .weights = {1, 3}, .sequence_length = 16});
  EXPECT_EQ(given.proportions(), (std::vector<double>{0.25, 0.75}));
  for (int64_t period = 0; period < 3; ++period) {
    int64_t first = 0;
    for (int64_t n = 0; n < 1024; ++n) first += given.place(period * 1024 + n).domain == 0;
    EXPECT_EQ(first, 256) << "period " << period;
  }
}

TEST(Sampler, KeepsADomainsOrderWhateverIsMixedIn) {
  const Folder folder;
  const TokenStore store(counting_store(folder, {{"a", 9000}, {"b", 9000}}));
  auto offsets_of_a = [&](const Sampler& sampler, int64_t domain) {
    std::set<int64_t> offsets;
    for (int64_t n = 0; n < 1024; ++n)
      if (const auto place = sampler.place(n); place.domain == domain && place.epoch == 0)
        offsets.insert(place.offset);
    return offsets;
  };
  const Sampler alone(store, {.domains = {"a"}, .sequence_length = 8});
  const Sampler mixed(store, {.domains = {"b", "a"}, .sequence_length = 8});
  const auto all = offsets_of_a(alone, 0);
  const auto half = offsets_of_a(mixed, 1);
  EXPECT_EQ(half.size(), 512u);
  EXPECT_TRUE(std::includes(all.begin(), all.end(), half.begin(), half.end()));
}

TEST(Sampler, SmallestDomain) {
  const Folder folder;
  const TokenStore store(counting_store(folder, {{"a", 9}}));
  const Sampler sampler(store, {.sequence_length = 8});
  EXPECT_EQ(sampler.blocks(0), 1);
  EXPECT_EQ(sampler.place(5).offset, 0);
  EXPECT_MESSAGE(Sampler(store, {.sequence_length = 9}), "fewer than sequence_length + 1");
}

TEST(Sampler, SaysWhatIsWrong) {
  const Folder folder;
  const TokenStore store(counting_store(folder, {{"web", 900}}));
  EXPECT_MESSAGE(Sampler(store, {.sequence_length = 0}), "sequence_length is 0");
  EXPECT_MESSAGE(Sampler(store, {.domains = {"wib"}, .sequence_length = 8}), "did you mean 'web'?");
  EXPECT_MESSAGE(Sampler(store, {.weights = {1, 2}, .sequence_length = 8}),
                 "2 weights for 1 domains");
  EXPECT_MESSAGE(Sampler(store, {.weights = {-1}, .sequence_length = 8}), "positive numbers");
  EXPECT_MESSAGE(Sampler(store, {.sequence_length = 8, .split = "tset"}), "no domain has a split");
}

fs::path document_store(const Folder& folder, const std::vector<int64_t>& lengths) {
  StoreWriter writer(folder / "store", {"none", "", 1000, 0});
  for (const int64_t length : lengths) {
    std::vector<int32_t> tokens(size_t(length - 1));
    std::iota(tokens.begin(), tokens.end(), 1);
    writer.add("a", "test", tokens, length);
  }
  writer.commit();
  return folder / "store";
}

TEST(HeldOut, CoversEveryTokenOnceWithoutALimit) {
  const Folder folder;
  const TokenStore store(document_store(folder, {5, 1, 16, 17, 40}));
  const Documents& documents = store.documents("a", "test");
  std::map<int64_t, int64_t> covered;
  for (const Segment& segment : held_out_segments(documents, 0, 16)) {
    EXPECT_EQ(covered[segment.document], segment.begin);
    EXPECT_LE(segment.length, 16);
    covered[segment.document] += segment.length;
  }
  EXPECT_EQ(covered, (std::map<int64_t, int64_t>{{0, 5}, {1, 1}, {2, 16}, {3, 17}, {4, 40}}));
}

TEST(HeldOut, TakesFirstSegmentsFirst) {
  const Folder folder;
  const TokenStore store(document_store(folder, std::vector<int64_t>(50, 64)));
  const Documents& documents = store.documents("a", "test");
  const auto all_first = held_out_segments(documents, 50 * 16, 16);
  ASSERT_EQ(all_first.size(), 50u);
  for (const Segment& segment : all_first) EXPECT_EQ(segment.begin, 0);
  const auto few = held_out_segments(documents, 10 * 16 + 15, 16);
  ASSERT_EQ(few.size(), 10u);
  EXPECT_GT(few.back().document, 20);  // from all over the file, not its beginning
  EXPECT_EQ(held_out_segments(documents, 1, 16).size(), 1u);
}

TEST(HeldOut, FirstContextIsTheSeparator) {
  const Folder folder;
  const TokenStore store(document_store(folder, {6}));
  const Documents& documents = store.documents("a", "test");
  std::vector<int64_t> tokens(4);
  read_segment(documents, 0, {0, 0, 3}, tokens.data());
  EXPECT_EQ(tokens, (std::vector<int64_t>{0, 1, 2, 3}));
  read_segment(documents, 0, {0, 3, 3}, tokens.data());
  EXPECT_EQ(tokens, (std::vector<int64_t>{3, 4, 5, 0}));
}

}  // namespace
}  // namespace assay::data
