// assay eval: the numbers of a run, measured again.
#include <nlohmann/json.hpp>

#include "cli/program.h"

namespace assay::cli {
namespace {

using Json = nlohmann::json;

struct Eval : testing::Test {
  void SetUp() override {
    synthesize(folder);
    const Outcome trained = run(folder.path(), train("run"));
    ASSERT_EQ(trained.exit_code, 0) << trained.error;
  }
  Json json(const std::string& arguments) {
    const Outcome outcome = run(folder.path(), arguments + " --threads 1 --device cpu --json");
    EXPECT_EQ(outcome.exit_code, 0) << outcome.error;
    return Json::parse(outcome.out);
  }
  data::Folder folder;
};

TEST_F(Eval, LossIsWhatTheTrainerFoundAtTheEnd) {
  std::istringstream lines(read_file(folder / "run/metrics.jsonl"));
  Json last;
  for (std::string line; std::getline(lines, line);)
    if (Json json = Json::parse(line); json.contains("evaluation")) last = json["evaluation"];
  const Json found =
      json("eval loss run --data store --tokens 4096 --documents losses.safetensors")["evaluation"];
  ASSERT_EQ(found.size(), last.size());
  for (const auto& [set, losses] : last.items()) {
    EXPECT_EQ(found[set]["tokens"], losses["tokens"]) << set;
    EXPECT_NEAR(found[set]["loss"].get<double>(), losses["loss"].get<double>(), 1e-6) << set;
  }
  EXPECT_TRUE(fs::exists(folder / "losses.safetensors"));
  const Json of_test = json("eval loss run --data store --split test")["evaluation"];
  for (const auto& [set, losses] : of_test.items()) EXPECT_TRUE(set.ends_with(".test")) << set;
}

TEST_F(Eval, LossesNameTheModelAndTheTokensOfItsCheckpoint) {
  const auto run_line = [&](const std::string& model) {
    const Outcome outcome =
        run(folder.path(), "losses " + model + " --data store -o losses --threads 1 --device cpu");
    EXPECT_EQ(outcome.exit_code, 0) << outcome.error;
    const std::string text = read_file(folder / "losses");
    return Json::parse(text.substr(0, text.find('\n')))["run"];
  };
  const Json end = run_line("run/");
  EXPECT_EQ(end["model"], "run");
  EXPECT_EQ(run_line("run/checkpoints/step-10")["tokens"], end["tokens"].get<int64_t>() / 2);
}

TEST_F(Eval, ProbeIsWhatTheTrainerWrote) {
  const Json written = Json::parse(read_file(folder / "run/probes.json"));
  const Json found = json("eval probe run --data store");
  EXPECT_EQ(found["layers"], written["layers"]);
  EXPECT_EQ(found["set"], written["set"]);
  ASSERT_EQ(found["layers"].size(), 2u);
  EXPECT_NE(json("eval probe run/checkpoints/step-10 --data store")["layers"], written["layers"])
      << "an earlier checkpoint";
}

// The last bytes of the file are those of a weight.
void damage_weights(const fs::path& file, const std::string& last_bytes) {
  const std::string bytes = read_file(file);
  write_file(file, bytes.substr(0, bytes.size() - last_bytes.size()) + last_bytes);
}

TEST_F(Eval, DamagedWeightsAreRejected) {
  damage_weights(folder / "run/checkpoints/step-20/model.safetensors", "damaged!");
  for (const char* command : {"eval loss run --data store", "export run -o out",
                              "eval extrapolation run --data store --set web.test"}) {
    const Outcome outcome = run(folder.path(), command);
    EXPECT_EQ(outcome.exit_code, 2) << command;
    EXPECT_NE(outcome.error.find("the file is damaged"), std::string::npos) << outcome.error;
  }
}

TEST_F(Eval, WeightsThatAreNotFiniteAreRejected) {
  ASSERT_EQ(run(folder.path(), "import run -o model").exit_code, 0);
  const std::string not_a_number = "\xff\xff\xff\x7f";
  damage_weights(folder / "model/model.safetensors", not_a_number);
  for (const char* command :
       {"eval loss model --data store", "export model -o out", "generate --model model --prompt a",
        "eval extrapolation model --data store --set web.test"}) {
    const Outcome outcome = run(folder.path(), command);
    EXPECT_EQ(outcome.exit_code, 2) << command;
    EXPECT_NE(outcome.error.find("holds values that are NaN or infinite (1 of"), std::string::npos)
        << outcome.error;
  }
}

TEST_F(Eval, WrongNamesAreRefused) {
  for (const auto& [arguments, part] :
       {std::pair{"eval loss run --data store --split nope", "no domain has a split 'nope'"},
        {"eval probe run --data store --set nowhere", "names no evaluation set"},
        {"eval loss missing --data store", "no such model"}}) {
    const Outcome outcome = run(folder.path(), arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_NE(outcome.error.find(part), std::string::npos) << outcome.error;
  }
}

}  // namespace
}  // namespace assay::cli
