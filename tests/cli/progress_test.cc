// Output that a user sees while a run is checked or trained, and after it.
#include <chrono>
#include <nlohmann/json.hpp>

#include "cli/program.h"

namespace assay::cli {
namespace {

using nlohmann::json;

TEST(TrainProgress, ShowsTheHeldOutLossOfTheTrainingDomains) {
  const data::Folder folder;
  synthesize(folder);
  const Outcome outcome =
      run(folder.path(), train("run", "--set train.steps=4 --set train.eval_every=2"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.error;
  EXPECT_NE(outcome.error.find("step 1/4  held-out loss "), std::string::npos) << outcome.error;
  const json end = json::parse(read_file(folder / "run" / "end.json")).at("sets");
  const auto loss = [&](const char* set) { return end.at(set).at("loss").get<double>(); };
  const double expected = (loss("known_a.valid") + loss("known_b.valid")) / 2;
  EXPECT_NEAR(
      json::parse(read_file(folder / "run" / "done.json")).at("held_out_loss").get<double>(),
      expected, 1e-9);
  EXPECT_NE(outcome.out.find(fmt::format("held-out loss {:.4f}", expected)), std::string::npos)
      << outcome.out;
}

TEST(DryRun, OfLongSequencesTakesSeconds) {
  const data::Folder folder;
  const Outcome made =
      run(folder.path(), "data synth -o store --documents 300 --held-out 4 --document-length 1024");
  ASSERT_EQ(made.exit_code, 0) << made.error;
  // A whole step is a minute of work for one core, and the trainer used to make several.
  Process dry_run(
      folder.path(),
      train("run", "--dry-run --set train.sequence_length=65536 --set model.num_layers=8"));
  for (int i = 0; i < 1000 && dry_run.running(); ++i) sleep_seconds(0.1);
  ASSERT_FALSE(dry_run.running()) << "still at work after 100 s";
  const Outcome outcome = dry_run.wait();
  EXPECT_EQ(outcome.exit_code, 0) << outcome.error;
  EXPECT_NE(outcome.error.find("building the model"), std::string::npos) << outcome.error;
}

}  // namespace
}  // namespace assay::cli
