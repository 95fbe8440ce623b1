// A run ends in the same bytes however often it was interrupted or killed.
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/random.h"
#include "base/safetensors.h"
#include "cli/program.h"

namespace assay::cli {
namespace {

using nlohmann::json;

const std::string kSettings =
    "--set train.steps=60 --set train.checkpoint_every=3 --set train.eval_every=3 ";

std::vector<int> checkpoint_steps(const fs::path& run) {
  std::vector<int> steps;
  if (!fs::exists(run / "checkpoints")) return steps;
  for (const auto& entry : fs::directory_iterator(run / "checkpoints"))
    if (entry.path().filename().string().starts_with("step-"))
      steps.push_back(std::stoi(entry.path().filename().string().substr(5)));
  std::ranges::sort(steps);
  return steps;
}

// Results that must not depend on interruptions of the run: weights, moments, losses by document,
// metrics without their times.
std::map<std::string, std::string> results(const fs::path& run) {
  std::map<std::string, std::string> out;
  for (const auto& [path, hash] : contents(run))
    if (path.ends_with(".safetensors")) out[path] = hash;
  std::istringstream lines(read_file(run / "metrics.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    json record = json::parse(line);
    for (const char* timed : {"tokens_per_second", "mfu", "seconds", "memory_bytes"})
      record.erase(timed);
    out["metrics"] += record.dump() + "\n";
  }
  out["final_loss"] = json::parse(read_file(run / "done.json")).at("final_loss").dump();
  return out;
}

class Resume : public testing::Test {
 protected:
  void SetUp() override {
    synthesize(folder_);
    const Outcome whole = run(folder_.path(), train("whole", kSettings));
    ASSERT_EQ(whole.exit_code, 0) << whole.error;
  }
  void finish(const std::string& name) {
    const Outcome last = run(folder_.path(), train(name, kSettings + "--resume"));
    EXPECT_EQ(last.exit_code, 0) << last.error;
    expect_same(name);
  }
  void expect_same(const std::string& name) {
    const auto expected = results(folder_ / "whole");
    const auto got = results(folder_ / name);
    EXPECT_TRUE(expected.contains("checkpoints/step-60/model.safetensors") &&
                expected.contains("checkpoints/step-60/optimizer.safetensors") &&
                expected.contains("evaluations/step-60.safetensors"));
    for (const auto& [path, content] : expected)
      EXPECT_TRUE(got.contains(path) && got.at(path) == content) << path << " differs";
    EXPECT_EQ(got.size(), expected.size());
  }
  data::Folder folder_;
};

TEST_F(Resume, SameSeedSameBytes) {
  ASSERT_EQ(run(folder_.path(), train("again", kSettings)).exit_code, 0);
  expect_same("again");
  ASSERT_EQ(run(folder_.path(), train("other", kSettings + "--set train.seed=1")).exit_code, 0);
  EXPECT_NE(results(folder_ / "other").at("checkpoints/step-60/model.safetensors"),
            results(folder_ / "whole").at("checkpoints/step-60/model.safetensors"));
}

// Up to ten times: a fast processor ends the run before.
TEST_F(Resume, KilledSeveralTimesSameBytes) {
  const uint64_t seed = uint64_t(std::chrono::steady_clock::now().time_since_epoch().count());
  SCOPED_TRACE(fmt::format("seed {}", seed));
  Random random(seed, "kills");
  const fs::path run = folder_ / "killed";
  const auto started = [&] {  // run.json is written anew each time, just before the steps
    struct stat status{};
    ::stat((run / "run.json").c_str(), &status);
    return status.st_mtim.tv_sec * 1'000'000'000 + status.st_mtim.tv_nsec;
  };
  std::string reached;
  int kills = 0;
  for (; kills < 10 && !fs::exists(run / "done.json"); ++kills) {
    const auto before = started();
    Process process(folder_.path(), train("killed", kSettings + "--resume"));
    if (kills > 0)
      ASSERT_TRUE(wait_until(process, [&] { return started() != before; }))
          << process.wait().error;  // the first dies anywhere
    sleep_seconds(0.1 * random.uniform());
    process.signal(SIGKILL);
    const int code = process.wait().exit_code;
    if (code == 0) break;
    EXPECT_EQ(code, 128 + SIGKILL) << "kill " << kills << "; reached " << reached;
    const auto steps = checkpoint_steps(run);
    reached += fmt::format(" {}", steps.empty() ? 0 : steps.back());
  }
  EXPECT_GE(kills, 3);
  RecordProperty("checkpoints_when_killed", reached);
  SCOPED_TRACE("checkpoints when killed:" + reached);
  finish("killed");
}

TEST_F(Resume, ControlCSavesAndLeaves) {
  Process process(folder_.path(), train("interrupted", kSettings));
  ASSERT_TRUE(
      wait_until(process, [&] { return !checkpoint_steps(folder_ / "interrupted").empty(); }));
  process.signal(SIGINT);
  const Outcome outcome = process.wait();
  EXPECT_EQ(outcome.exit_code, 130) << outcome.error;
  EXPECT_NE(outcome.error.find("saved in interrupted. Continue with --resume."), std::string::npos)
      << outcome.error;
  EXPECT_FALSE(fs::exists(folder_ / "interrupted" / "done.json"));
  finish("interrupted");
}

TEST_F(Resume, KilledAfterTheLastStep) {
  fs::copy(folder_ / "whole", folder_ / "late", fs::copy_options::recursive);
  fs::remove(folder_ / "late" / "done.json");
  finish("late");
}

TEST_F(Resume, MissingMetricsAreNamed) {
  fs::copy(folder_ / "whole", folder_ / "cut", fs::copy_options::recursive);
  fs::remove(folder_ / "cut" / "done.json");
  const std::string resume = train("cut", kSettings + "--resume");
  EXPECT_EQ(run(folder_.path(), resume).error.find("are missing"), std::string::npos);
  fs::remove(folder_ / "cut" / "done.json");
  fs::resize_file(folder_ / "cut" / "metrics.jsonl", 100);
  const Outcome outcome = run(folder_.path(), resume);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.error;
  EXPECT_NE(outcome.error.find("cut/metrics.jsonl: the lines of steps 1 to "), std::string::npos)
      << outcome.error;
}

TEST_F(Resume, AnAbsurdLearningRateStopsWithStepAndLayer) {
  const Outcome outcome =
      run(folder_.path(),
          train("wild", kSettings + "--set train.learning_rate=1e6 --set train.warmup_steps=0"));
  EXPECT_EQ(outcome.exit_code, 1);
  for (const char* part : {"assay: step 1: loss", "first non-finite value in layer ",
                           "there is no checkpoint before it", "Lower learning_rate"})
    EXPECT_NE(outcome.error.find(part), std::string::npos) << part << "\n" << outcome.error;
  EXPECT_FALSE(fs::exists(folder_ / "wild" / "done.json"));
}

TEST_F(Resume, WeightsThatOverflowStopWithLayerWeightAndLastGoodCheckpoint) {
  {
    Process process(folder_.path(), train("broken", kSettings));
    ASSERT_TRUE(
        wait_until(process, [&] { return checkpoint_steps(folder_ / "broken").size() >= 2; }));
    process.signal(SIGKILL);
    process.wait();
  }
  const auto steps = checkpoint_steps(folder_ / "broken");
  const fs::path file = folder_ / "broken" / "checkpoints" / fmt::format("step-{}", steps.back()) /
                        "model.safetensors";
  fs::copy(file, folder_ / "copy");
  const Safetensors weights(folder_ / "copy");
  std::vector<TensorEntry> tensors = weights.tensors();
  const auto victim =
      std::ranges::find(tensors, "layers_1.mixer.out_proj.weight", &TensorEntry::name);
  ASSERT_NE(victim, tensors.end());
  const std::vector<float> infinite(victim->bytes.size() / sizeof(float), INFINITY);
  victim->bytes = std::as_bytes(std::span(infinite));
  write_safetensors(file, tensors);
  const fs::path state = file.parent_path() / "state.json";
  nlohmann::json changed = nlohmann::json::parse(read_file(state));
  changed.erase("weights_checksum");
  write_file(state, changed.dump());
  const Outcome outcome = run(folder_.path(), train("broken", kSettings + "--resume"));
  EXPECT_EQ(outcome.exit_code, 1);
  for (const std::string& part :
       {fmt::format("assay: step {}: ", steps.back()),
        std::string("layer 1 (mamba1), weight ") + victim->name,
        fmt::format("the last good checkpoint is broken/checkpoints/step-{}",
                    steps[steps.size() - 2])})
    EXPECT_NE(outcome.error.find(part), std::string::npos) << part << "\n" << outcome.error;
}

TEST_F(Resume, CheckpointOfAnotherStepIsRefused) {
  const auto steps = checkpoint_steps(folder_ / "whole");
  const fs::path checkpoints = folder_ / "whole" / "checkpoints";
  fs::remove(folder_ / "whole" / "done.json");
  fs::remove_all(checkpoints / fmt::format("step-{}", steps.back()));
  fs::rename(checkpoints / fmt::format("step-{}", steps.front()),
             checkpoints / fmt::format("step-{}", steps.back()));
  const Outcome outcome = run(folder_.path(), train("whole", kSettings + "--resume"));
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_NE(outcome.error.find(fmt::format("state.json is that of step {}", steps.front())),
            std::string::npos)
      << outcome.error;
}

// Versions before 26 November 2026 made 28 steps of a warm-up of 0.29 · 100.
TEST(ResumeOfEarlierRuns, WarmUpOfTheEarlierRoundingIsKept) {
  const data::Folder folder;
  synthesize(folder);
  std::string model = read_file(kSmoke);
  const std::string line = "warmup_steps    = 4";
  model.replace(model.find(line), line.size(), "warmup_fraction = 0.29");
  write_file(folder / "model.toml", model);
  const std::string command =
      "train model.toml --data store -o run --threads 1 --device cpu --set train.steps=100 ";
  Outcome outcome = run(folder.path(), command + "--set train.warmup_steps=28");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.error;
  outcome = run(folder.path(), command + "--resume");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.error;
  EXPECT_NE(read_file(folder / "run" / "config.toml").find("warmup_steps = 28"), std::string::npos);
}

}  // namespace
}  // namespace assay::cli
