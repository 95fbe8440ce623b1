// Counter-based random numbers: the published vectors, the distributions, and permutations
// that are permutations.
#include "base/random.h"

#include <gtest/gtest.h>

#include <vector>

namespace assay {
namespace {

using Block = std::array<uint32_t, 4>;

TEST(Philox, KnownAnswers) {  // Random123's kat_vectors, philox4x32-10
  EXPECT_EQ(philox(0, 0, 0), (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox(~0ull, ~0ull, ~0ull), (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Purpose, IsFnv1a) {  // the published test vectors
  EXPECT_EQ(purpose(""), 0xcbf29ce484222325u);
  EXPECT_EQ(purpose("a"), 0xaf63dc4c8601ec8cu);
  EXPECT_EQ(purpose("foobar"), 0x85944171f73967e8u);
}

TEST(Random, IsAPureFunctionOfItsKeyAndIndex) {
  Random walk(7, "test", 3);
  const Random access(7, "test", 3);
  for (uint64_t i = 0; i < 100; ++i) EXPECT_EQ(walk.next(), access.at(i)) << "index " << i;
  EXPECT_NE(access.at(0), Random(8, "test", 3).at(0));
  EXPECT_NE(access.at(0), Random(7, "tesu", 3).at(0));
  EXPECT_NE(access.at(0), Random(7, "test", 4).at(0));
}

TEST(Random, MomentsWithinSixStandardErrors) {
  constexpr int n = 200'000;
  Random random(1, "moments");
  double uniform = 0;
  double normal = 0;
  double square = 0;
  for (int i = 0; i < n; ++i) {
    const double u = random.uniform();
    const double z = random.normal();
    ASSERT_TRUE(u >= 0 && u < 1 && std::isfinite(z)) << "index " << i;
    uniform += u / n;
    normal += z / n;
    square += z * z / n;
  }
  EXPECT_NEAR(uniform, 0.5, 6 * std::sqrt(1.0 / 12 / n));
  EXPECT_NEAR(normal, 0, 6 * std::sqrt(1.0 / n));
  EXPECT_NEAR(square, 1, 6 * std::sqrt(2.0 / n));
}

TEST(Random, BelowCoversItsRange) {
  Random random(2, "below");
  std::vector<int> counts(7);
  for (int i = 0; i < 70'000; ++i) ++counts.at(random.below(7));
  for (const int count : counts) EXPECT_NEAR(count, 10'000, 6 * std::sqrt(10'000));
  EXPECT_EQ(random.below(1), 0u);
}

TEST(Permutation, IsABijection) {
  for (const uint64_t size : {1u, 2u, 3u, 4u, 5u, 16u, 17u, 255u, 256u, 257u, 1024u, 10'007u})
    for (const uint64_t seed : {0u, 1u, 2u}) {
      const Permutation permutation(size, seed, purpose("test"), seed);
      std::vector<bool> hit(size);
      for (uint64_t i = 0; i < size; ++i) {
        const uint64_t image = permutation(i);
        ASSERT_LT(image, size) << "size " << size << " seed " << seed;
        EXPECT_FALSE(hit[image]) << "size " << size << " seed " << seed << " index " << i;
        hit[image] = true;
      }
    }
}

TEST(Permutation, DependsOnSeedAndStepAndMixes) {
  constexpr uint64_t size = 4096;
  const Permutation a(size, 1, 2, 3);
  const Permutation b(size, 2, 2, 3);
  const Permutation c(size, 1, 2, 4);
  int fixed = 0;
  int same_seed = 0;
  int same_step = 0;
  int neighbours = 0;
  for (uint64_t i = 0; i < size; ++i) {
    fixed += a(i) == i;
    same_seed += a(i) == b(i);
    same_step += a(i) == c(i);
    neighbours += i && a(i) == a(i - 1) + 1;
  }
  // About 1 each is expected
  for (const int count : {fixed, same_seed, same_step, neighbours}) EXPECT_LE(count, 10);
}

}  // namespace
}  // namespace assay
