// Plans on the command line: `assay plan new`, and plans by name.
#include "base/config.h"
#include "cli/program.h"

namespace assay::cli {
namespace {

class Plans : public testing::Test {
 protected:
  void SetUp() override { synthesize(folder_); }
  void expect(const std::string& arguments, int exit_code, const std::string& part) {
    const Outcome outcome = run(folder_.path(), arguments);
    EXPECT_EQ(outcome.exit_code, exit_code) << arguments << "\n" << outcome.error;
    EXPECT_NE((outcome.out + outcome.error).find(part), std::string::npos)
        << arguments << ": '" << part << "' is not in\n"
        << outcome.out << outcome.error;
  }
  data::Folder folder_;
};

TEST_F(Plans, NewPlanPassesADryRun) {
  expect("plan new --data store -o mine.toml", 0, "mine.toml: written");
  const ConfigNode data = ConfigNode::read_file(folder_ / "mine.toml").child("data");
  EXPECT_EQ(data.value("train"), "[\"known_a\", \"known_b\"]");
  EXPECT_EQ(data.value("out_of_domain"), "[\"fresh_a\", \"fresh_b\", \"fresh_c\"]");
  expect("run mine.toml -o study --dry-run --threads 1 --devices cpu", 0, "Nothing was trained");
}

TEST_F(Plans, NewPlanNeverOverwritesAFile) {
  folder_.write("mine.toml", "kept");
  expect("plan new --data store -o mine.toml", 2, "mine.toml: exists already");
  EXPECT_EQ(read_file(folder_ / "mine.toml"), "kept");
  expect("plan new --data store -o missing/mine.toml", 2, "there is no folder missing");
}

TEST_F(Plans, NewPlanTakesTheDomainsToTrainOn) {
  expect("plan new --data store --train known_b", 0, "train           = [\"known_b\"]");
  expect("plan new --data store --train knwn_b", 2, "did you mean 'known_b'?");
  expect("plan new --data store --train known_a,known_a", 2, "names the domain 'known_a' twice");
  expect("plan new --data missing", 2, "missing");
}

TEST_F(Plans, NameOfAPlanIsEnough) {
  expect("run pocket -o study --data store --dry-run", 2, "pocket.toml:");
  EXPECT_FALSE(fs::exists(folder_ / "study"));
  expect("run poket -o study --data store --dry-run", 2, "did you mean 'pocket'?");
}

}  // namespace
}  // namespace assay::cli
