// Every parser survives its seeds, many random changes of them, and inputs that once broke it.
#include "fuzz/parsers.h"

#include <gtest/gtest.h>

namespace assay::fuzz {
namespace {

struct Parsers : testing::TestWithParam<std::string> {
  const Parser& parser = parsers().at(GetParam());
};

TEST_P(Parsers, SeedsAreAccepted) {
  const auto seeds = parser.seeds();
  ASSERT_FALSE(seeds.empty());
  for (const std::string& seed : seeds) EXPECT_EQ(try_parser(parser, seed), "");
}

TEST_P(Parsers, ChangedSeedsAreAcceptedOrRejectedWithAnError) {
  constexpr int kInputs = 500;
  Random random(1, "mutation of " + GetParam());
  const auto seeds = parser.seeds();
  int rejected = 0;
  for (int i = 0; i < kInputs; ++i) {
    const std::string& seed = seeds[random.below(seeds.size())];
    const std::string input = mutated(parser, seed, random);
    SCOPED_TRACE(testing::Message() << "input " << i);
    rejected += !try_parser(parser, input).empty();
  }
  EXPECT_GT(rejected, 0);
}

// regressions/PARSER/NAME are inputs that once ended in something else.
TEST(ParserRegressions, InputsAreAcceptedOrRejectedWithAnError) {
  for (const auto& entry :
       fs::recursive_directory_iterator(ASSAY_SOURCE_DIR "/tests/fuzz/regressions")) {
    if (!entry.is_regular_file()) continue;
    SCOPED_TRACE(entry.path());
    try_parser(parsers().at(entry.path().parent_path().filename()), read_file(entry.path()));
  }
}

// JSON far deeper than any code that recurses over it can bear.
TEST(Json, DeepFilesAreRejected) {
  const std::string deep(100'000, '[');
  const std::string end(100'000, ']');
  for (const char* name : {"manifest", "record", "recorded_plan"})
    EXPECT_NE(try_parser(parsers().at(name), deep + end).find("more than 64 levels"),
              std::string::npos)
        << name;
  for (char file = 0; file < 5; ++file)
    EXPECT_NE(try_parser(parsers().at("run"), file + ("{\"step\": " + deep + end + "}"))
                  .find("more than 64 levels"),
              std::string::npos)
        << int(file);
}

INSTANTIATE_TEST_SUITE_P(All, Parsers, testing::ValuesIn(parsers().names()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace assay::fuzz
