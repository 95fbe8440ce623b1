// `assay bench attention`: a row a form and length; what is slow is left out of longer sequences;
// other programs' rows join.
#include <nlohmann/json.hpp>

#include "cli/program.h"

namespace assay::cli {
namespace {

using Json = nlohmann::json;

struct BenchAttention : testing::Test {
  Outcome bench(const std::string& arguments) {
    const std::string command = "bench attention --device cpu --threads 1 --seconds 0 ";
    const std::string shape = "--heads 2 --head-dim 8 --window 8 --chunk-size 8 ";
    return run(folder_.path(), command + shape + arguments);
  }
  Json rows(const std::string& arguments) {
    const Outcome outcome = bench(arguments + " --json");
    EXPECT_EQ(outcome.exit_code, 0) << outcome.error;
    const Json document = Json::parse(outcome.out);
    for (const char* fact : {"assay", "date", "device", "torch"})
      EXPECT_FALSE(document.value(fact, "").empty()) << fact;
    return document["rows"];
  }
  data::Folder folder_;
};

TEST_F(BenchAttention, TimesEveryFormAtEveryLength) {
  const Json found = rows("--lengths 24,40");
  ASSERT_EQ(found.size(), 10);
  for (const Json& row : found) {
    EXPECT_FALSE(row.contains("failure")) << row;
    EXPECT_GT(row["forward"], 0) << row;
    EXPECT_GT(row["backward"], 0) << row;
  }
  EXPECT_EQ(found[0]["time"], 24);
  EXPECT_EQ(found[5]["time"], 40);
}

TEST_F(BenchAttention, LeavesOutWhatIsSlowWhereSequencesGetLonger) {
  EXPECT_EQ(rows("--lengths 24,40 --limit 1e-9").size(), 5);  // all of them at 24, none at 40
}

TEST_F(BenchAttention, SetsRowsOfAnotherProgramBesideItsOwn) {
  write_file(folder_.path() / "other.json",
             R"({"rows": [{"time": 24, "form": "theirs", "forward": 1.5, "backward": 2.5},
                          {"time": 24, "form": "broken", "failure": "no such kernel"}]})");
  const Outcome outcome = bench("--lengths 24,40 --compare other.json --svg growth.svg");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.error;
  EXPECT_LT(outcome.out.find("1500.000     2500.000"), outcome.out.find("      40  full"))
      << outcome.out;
  EXPECT_NE(outcome.out.find("no such kernel"), std::string::npos) << outcome.out;
  EXPECT_NE(read_file(folder_.path() / "growth.svg").find(">theirs<"), std::string::npos);
}

TEST_F(BenchAttention, RefusesRowsThatAreNone) {
  for (const char* text : {"[1, 2]", "{\"rows\": [{\"time\": 24}]}", "{"}) {
    write_file(folder_.path() / "other.json", text);
    const Outcome outcome = bench("--lengths 24 --compare other.json");
    EXPECT_EQ(outcome.exit_code, 2);
    EXPECT_NE(outcome.error.find("other.json: "), std::string::npos) << outcome.error;
  }
}

}  // namespace
}  // namespace assay::cli
