// The trainer's arithmetic: accumulated gradients are the whole batch's, and a step's data is a
// pure function of the step.
#include "train/trainer.h"

#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "data/folder.h"
#include "data/sampler.h"
#include "data/synthetic.h"
#include "nn/tensors.h"
#include "nn/testing.h"
#include "run/metrics.h"
#include "train/checkpoint.h"

namespace assay::train {
namespace {

using data::Folder, data::message_of;

void synthesize(const fs::path& store) {
  data::SyntheticOptions options;
  options.documents = 20;
  options.held_out = 4;
  options.document_length = 64;
  options.vocabulary = 64;
  data::synthesize(store, options);
}
RunConfig config(const fs::path& store, const std::string& settings) {
  return read_run_config(
      ConfigNode::parse(
          "[model]\nd_model = 16\npattern = ['attention', 'mamba1']\n[model.attention]\n"
          "num_heads = 2\n[train]\n"
          "batch_size = 6\nsequence_length = 24\neval_tokens = 100\n" +
              settings,
          "m.toml"),
      store);
}
nn::NamedTensors weights(const Folder& folder, const std::string& run, int step) {
  return nn::load_tensors(folder / run / "checkpoints" / fmt::format("step-{}", step) /
                          "model.safetensors");
}

TEST(Trainer, AccumulatedGradientsAreTheWholeBatchs) {
  const Folder folder;
  synthesize(folder / "store");
  const std::string settings = "steps = 3\nprecision = 'fp64'\nepsilon = 1e-3\n";
  for (const int micro : {6, 3, 2, 1})
    train(config(folder / "store", settings + fmt::format("micro_batch_size = {}\n", micro)),
          {.store = folder / "store", .run = folder / std::to_string(micro), .device = "cpu"});
  const auto whole = weights(folder, "6", 3);
  for (const char* run : {"3", "2", "1"}) {
    const auto parts = weights(folder, run, 3);
    ASSERT_EQ(parts.size(), whole.size());
    for (size_t i = 0; i < whole.size(); ++i)
      EXPECT_LE(nn::relative_error(parts[i].second, whole[i].second), 1e-10)
          << whole[i].first << ", micro_batch_size " << run;
  }
}

TEST(Trainer, CutSequencesTrainAsWholeOnes) {
  const Folder folder;
  synthesize(folder / "store");
  const std::string settings = "steps = 3\nprecision = 'fp64'\nepsilon = 1e-3\n";
  const auto run = [&](const std::string& name, const std::string& more) {
    train(config(folder / "store", settings + more),
          {.store = folder / "store", .run = folder / name, .device = "cpu"});
    return weights(folder, name, 3);
  };
  const auto whole = run("whole", "");
  for (const std::string more :
       {"context_slices = 2\n", "context_slices = 3\ngradient_slices = 2\n",
        "context_slices = 6\nmicro_batch_size = 2\n",
        "context_slices = 4\nrecompute_activations = true\n"}) {
    const auto cut = run(sha256(more), more);
    for (size_t i = 0; i < whole.size(); ++i)
      EXPECT_LE(nn::relative_error(cut[i].second, whole[i].second), 1e-10)
          << whole[i].first << "; " << more;
  }
}

TEST(Trainer, RecomputedActivationsGiveTheSameWeights) {
  const Folder folder;
  synthesize(folder / "store");
  for (const char* recompute : {"false", "true"})
    train(config(folder / "store",
                 std::string(
                     "steps = 3\nprecision = 'fp64'\nepsilon = 1e-3\nrecompute_activations = ") +
                     recompute + "\n"),
          {.store = folder / "store", .run = folder / recompute, .device = "cpu"});
  const auto kept = weights(folder, "false", 3);
  const auto recomputed = weights(folder, "true", 3);
  for (size_t i = 0; i < kept.size(); ++i)
    EXPECT_LE(nn::relative_error(recomputed[i].second, kept[i].second), 1e-12) << kept[i].first;
}

TEST(Trainer, ABatchIsAPureFunctionOfTheStep) {
  const Folder folder;
  synthesize(folder / "store");
  const data::TokenStore store(folder / "store");
  const data::Sampler::Options options{.sequence_length = 24, .seed = 5};
  const auto batch = [](const data::Sampler& sampler, int64_t step) {
    std::vector<int64_t> tokens(6 * 25);
    sampler.batch(step, 6, tokens.data());
    return tokens;
  };
  const data::Sampler walked(store, options);
  std::vector<std::vector<int64_t>> forward;
  // Several epochs
  for (int64_t step = 0; step < 60; ++step) forward.push_back(batch(walked, step));
  for (int64_t step = 59; step >= 0; step -= 7)
    EXPECT_EQ(batch(data::Sampler(store, options), step), forward[size_t(step)]) << "step " << step;
  EXPECT_NE(forward[0], forward[1]);
}

TEST(Trainer, CheckpointsKeepTheNewestTwoAndThoseNamed) {
  const Folder folder;
  synthesize(folder / "store");
  train(config(folder / "store", "steps = 9\ncheckpoint_every = 2\nkeep_steps = [2, 5]\n"),
        {.store = folder / "store", .run = folder / "run", .device = "cpu"});
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder / "run" / "checkpoints"))
    names.insert(entry.path().filename());
  EXPECT_EQ(names, (std::set<std::string>{"step-2", "step-5", "step-8", "step-9"}));
  const run::Folder run{folder / "run"};
  EXPECT_EQ(newest_checkpoint(run)->path, folder / "run" / "checkpoints" / "step-9");
  EXPECT_EQ(newest_checkpoint(run, 7)->path, folder / "run" / "checkpoints" / "step-5");
  EXPECT_FALSE(newest_checkpoint(run, 1));
  EXPECT_FALSE(newest_checkpoint({folder / "nothing"}));
}

TEST(Trainer, StepToKeepOutsideTheRunIsRefused) {
  const Folder folder;
  synthesize(folder / "store");
  for (const char* step : {"0", "10"})
    EXPECT_NE(message_of([&] {
                config(folder / "store", fmt::format("steps = 9\nkeep_steps = [{}]\n", step));
              }).find("train.keep_steps must be a list of steps from 1 to 9"),
              std::string::npos)
        << step;
}

// Speed and memory of a run that was resumed: the steps before the restart have no time in the
// process that continues.
TEST(Trainer, ResumedRunKeepsItsMeasurements) {
  const Folder folder;
  synthesize(folder / "store");
  const RunConfig of_run =
      config(folder / "store", "steps = 100\ncheckpoint_every = 98\nlog_every = 100\n");
  const run::Folder run{folder / "run"};
  const TrainOptions options{
      .store = folder / "store", .run = run.path, .device = "cpu", .resume = true};
  const double speed = train(of_run, options).tokens_per_second;
  EXPECT_GT(speed, 0);
  const auto line = [&] { return run::read_metrics(run).training.at(0); };
  fs::remove_all(run.checkpoint(100).path);
  fs::remove(run.outcome().path);
  const run::Outcome resumed = train(of_run, options);  // from step 98
  EXPECT_LT(resumed.tokens_per_second, 10 * speed);
  EXPECT_EQ(resumed.tokens_per_second, line().tokens_per_second);
  // At the end: nothing is left to train
  fs::remove(run.outcome().path);
  std::string metrics = read_file(run.metrics());
  const std::string memory = "\"memory_bytes\":";
  const size_t at = metrics.find(memory) + memory.size();
  metrics.replace(at, metrics.find_first_of(",}", at) - at, "123456789012345");
  write_file(run.metrics(), metrics);
  const run::Outcome ended = train(of_run, options);
  EXPECT_EQ(ended.tokens_per_second, resumed.tokens_per_second);
  EXPECT_EQ(ended.peak_memory_bytes, 123456789012345);
}

TEST(Trainer, RunOfOtherNumericsIsNotResumed) {
  const Folder folder;
  synthesize(folder / "store");
  const RunConfig of_run = config(folder / "store", "steps = 2\n");
  const run::Folder run{folder / "run"};
  const TrainOptions options{
      .store = folder / "store", .run = run.path, .device = "cpu", .resume = true};
  train(of_run, options);
  fs::remove(run.outcome().path);
  run::Provenance provenance = run.provenance().read();
  const int64_t linear = provenance.numerics.at("linear");
  provenance.numerics["linear"] = linear + 1;
  provenance.started = "earlier";
  run.provenance().write(provenance);
  const std::string message = message_of([&] { train(of_run, options); });
  EXPECT_NE(message.find(fmt::format("started with numerics version {} of linear", linear + 1)),
            std::string::npos)
      << message;
  EXPECT_FALSE(run.outcome().exists());
  provenance.numerics["linear"] = linear;
  run.provenance().write(provenance);
  train(of_run, options);
  EXPECT_EQ(run.provenance().read().started, "earlier");
}

TEST(Trainer, ConfigOfARunReadsBackAsItself) {
  const Folder folder;
  synthesize(folder / "store");
  const RunConfig first = config(folder / "store", "tokens = 1000\n");
  EXPECT_EQ(read_run_config(ConfigNode::parse(first.toml()), folder / "store").toml(),
            first.toml());
}

}  // namespace
}  // namespace assay::train
