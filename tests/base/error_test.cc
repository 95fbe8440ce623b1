// Nearest names and the registry's refusals.
#include "base/error.h"

#include "base/registry.h"
#include "data/folder.h"

namespace assay {
namespace {

using data::message_of;

TEST(DidYouMean, NamesTheNearestAndNothingFarAway) {
  const std::vector<std::string> names = {"chunk_size", "num_heads", "selection"};
  EXPECT_EQ(did_you_mean("chunk_sise", names), "; did you mean 'chunk_size'?");
  EXPECT_EQ(did_you_mean("num_haeds", names), "; did you mean 'num_heads'?");
  EXPECT_EQ(did_you_mean("temperature", names), "");
  EXPECT_EQ(did_you_mean("x", {}), "");
  const std::vector<std::string> plans = {"top1", "demo"};
  EXPECT_EQ(did_you_mean("nope", plans), "") << "half of the letters are others";
  EXPECT_EQ(did_you_mean("dmeo", plans), "; did you mean 'demo'?") << "two changed places";
}

TEST(DidYouMean, BeginningOfANameNamesIt) {
  const std::vector<std::string> names = {"jamba", "mamba1", "arc_challenge", "arc_easy"};
  EXPECT_EQ(did_you_mean("mamba", names), "; did you mean 'mamba1'?") << "jamba is as near";
  EXPECT_EQ(did_you_mean("arc", names), "; did you mean 'arc_challenge'?");
  EXPECT_EQ(did_you_mean("a", names), "");
}

TEST(Registry, RefusesUnknownAndRepeatedNames) {
  Registry<int> registry("mixer");
  registry.add("attention", 1);
  registry.add("mamba1", 2);
  EXPECT_EQ(registry.at("mamba1"), 2);
  EXPECT_MESSAGE(
      registry.at("atention"),
      "unknown mixer 'atention'; did you mean 'attention'?\n  There are: attention, mamba1.");
  EXPECT_NE(message_of<Error>([&] { registry.add("mamba1", 3); }).find("registered twice"),
            std::string::npos);
}

TEST(ExitCodes, FollowTheKindOfError) {
  EXPECT_EQ(BadInput("").exit_code, 2);
  EXPECT_EQ(Error("").exit_code, 1);
  EXPECT_EQ(Interrupted("").exit_code, 130);
}

}  // namespace
}  // namespace assay
