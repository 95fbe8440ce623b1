// Plans on the command line: `assay plan new`, and plans by name.
#include <nlohmann/json.hpp>

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

TEST_F(Plans, NewPlanWarnsOfATrainingDomainWithoutHeldOutText) {
  auto manifest = nlohmann::json::parse(read_file(folder_ / "store" / "manifest.json"));
  std::erase_if(manifest["parts"].get_ref<nlohmann::json::array_t&>(), [](const auto& part) {
    return part["domain"] == "known_b" && part["split"] == "valid";
  });
  write_file(folder_ / "store" / "manifest.json", manifest.dump());
  const std::string warning = "warning: domain 'known_b' has training text but no split valid";
  expect("plan new --data store -o mine.toml", 0, warning);
  expect("plan new --data store", 0, "--valid-fraction");
  const Outcome chosen = run(folder_.path(), "plan new --data store --train known_a");
  EXPECT_EQ(chosen.error.find("no split valid"), std::string::npos) << chosen.error;
}

TEST_F(Plans, NameOfAPlanIsEnough) {
  expect("run pocket -o study --data store --dry-run", 2, "pocket.toml:");
  EXPECT_FALSE(fs::exists(folder_ / "study"));
  expect("run poket -o study --data store --dry-run", 2, "did you mean 'pocket'?");
}

TEST_F(Plans, ErrorsNameTheLineThatIsWrong) {
  const auto refuses = [&](const std::string& line, const std::vector<std::string>& parts) {
    folder_.write("plan.toml",
                  "reference = \"smoke\"\nmodels = [\"smoke\"]\n"
                  "data = { train = [\"known_a\"], sequence_length = 64 }\n" +
                      line + "\n");
    for (const std::string& part : parts)
      expect("run plan.toml -o study --data store --dry-run", 2, part);
  };
  refuses("size = { d_model = 33 }\ntrain = { steps = 2 }",
          {"plan.toml:4:20: model.smoke.attention: num_heads = 2 must", "divide d_model = 33"});
  refuses("size = { attention = { num_heads = 5 } }\ntrain = { steps = 2 }",
          {"plan.toml:4:22: model.smoke.attention: num_heads = 5"});
  refuses("tokens = []", {"plan.toml:4:10: tokens is empty"});
  refuses("[model.smoke]\ntokens = []", {"plan.toml:5:10: tokens is empty"});
  refuses("train = { btach = 8, steps = 2 }",
          {"plan.toml:4:19: unknown key 'btach' in train; did you mean 'batch'?"});
  refuses("train = { batch = 8, batch_size = 8 }", {"plan.toml:4:19: batch and batch_size"});
}

}  // namespace
}  // namespace assay::cli
