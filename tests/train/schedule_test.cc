// Learning rates worked out by hand, and the ranges that [train] refuses.
#include <torch/torch.h>

#include "data/folder.h"
#include "train/config.h"

namespace assay::train {
namespace {

using data::message_of;

TrainConfig config(const std::string& text) {
  const ConfigNode table = ConfigNode::parse(text, "m.toml");
  TrainConfig out;
  table.read(out);
  out.complete(table);
  return out;
}
void expect_rates(const std::string& text,
                  const std::vector<std::pair<int64_t, double>>& expected) {
  const TrainConfig c = config(text);
  for (const auto& [step, rate] : expected)
    EXPECT_NEAR(learning_rate_at(c, step), rate, 1e-15) << text << " step " << step;
}

TEST(Schedule, WarmUpReachesThePeakAtItsLastStep) {
  expect_rates("steps = 12\nwarmup_steps = 4\nlearning_rate = 0.8\nschedule = 'constant'",
               {{0, 0.2}, {1, 0.4}, {3, 0.8}, {4, 0.8}, {11, 0.8}});
}
TEST(Schedule, Linear) {
  expect_rates("steps = 12\nwarmup_steps = 4\nlearning_rate = 0.8",
               {{4, 0.8}, {5, 0.7}, {8, 0.4}, {11, 0.1}});
  expect_rates("steps = 4\nlearning_rate = 1\nfinal_learning_rate = 0.1",
               {{0, 1}, {1, 0.775}, {2, 0.55}, {3, 0.325}});
}
TEST(Schedule, Cosine) {  // cos(π/3) = 1/2, cos(π/2) = 0, cos(2π/3) = −1/2
  expect_rates("steps = 6\nlearning_rate = 1\nschedule = 'cosine'",
               {{0, 1}, {2, 0.75}, {3, 0.5}, {4, 0.25}});
  expect_rates("steps = 6\nlearning_rate = 2\nschedule = 'cosine'\nfinal_learning_rate = 0.1",
               {{3, 2 * (0.1 + 0.9 * 0.5)}});
}
TEST(Schedule, WarmUpStableDecay) {
  expect_rates(
      "steps = 12\nwarmup_steps = 2\nlearning_rate = 1\nschedule = 'wsd'\ndecay_fraction = 0.4",
      {{1, 1}, {2, 1}, {8, 1}, {9, 0.75}, {10, 0.5}, {11, 0.25}});
  expect_rates("steps = 10\nlearning_rate = 1\nschedule = 'wsd'\ndecay_fraction = 0",
               {{0, 1}, {9, 1}});
}
TEST(Schedule, WarmUpLongerThanTheRun) {
  expect_rates("steps = 2\nwarmup_steps = 8\nlearning_rate = 0.8", {{0, 0.1}, {1, 0.2}});
}

TEST(TrainSettings, TokensAndStepsGiveEachOther) {
  // 3.9 rounded up
  EXPECT_EQ(config("tokens = 1000\nbatch_size = 4\nsequence_length = 64").steps, 4);
  EXPECT_EQ(config("tokens = 1000\nbatch_size = 4\nsequence_length = 64").tokens, 1024);
  EXPECT_EQ(config("steps = 3\nbatch_size = 4\nsequence_length = 64").tokens, 768);
  const TrainConfig again =
      // A run's own config.toml
      config("steps = 3\ntokens = 768\nbatch_size = 4\nsequence_length = 64");
  EXPECT_EQ(again.steps, 3);
}

TEST(TrainSettings, WarmUpFractionIsRoundedDownFromTheDecimalNumber) {
  for (const auto& [fraction, steps, warmup] :
       std::vector<std::tuple<std::string, int, int>>{{"0.29", 100, 29},
                                                      {"0.57", 100, 57},
                                                      {"0.58", 100, 58},
                                                      {"0.1", 25, 2},
                                                      {"0.299999", 100, 29},
                                                      {"0.01", 99, 0},
                                                      {"0.07", 3'000'000, 210'000}})
    EXPECT_EQ(config(fmt::format("steps = {}\nwarmup_fraction = {}", steps, fraction)).warmup_steps,
              warmup)
        << fraction << " of " << steps;
}

// Earlier versions made 28 steps of 0.29 · 100. Their config.toml has both keys.
TEST(TrainSettings, EarlierRoundingOfTheWarmUpIsKept) {
  for (const int steps : {28, 29})
    EXPECT_EQ(config(fmt::format("steps = 100\nwarmup_fraction = 0.29\nwarmup_steps = {}", steps))
                  .warmup_steps,
              steps);
  EXPECT_MESSAGE(config("steps = 100\nwarmup_fraction = 0.29\nwarmup_steps = 27"),
                 "warmup_fraction");
}

TEST(TrainSettings, RangesAreRefusedWithThePlace) {
  for (const auto& [text, key] : std::vector<std::pair<std::string, std::string>>{
           {"steps = 0", "steps"},
           {"steps = -1", "steps"},
           {"steps = 5\ntokens = 77", "steps"},
           {"steps = 1\nbatch_size = 0", "batch_size"},
           {"steps = 1\nbatch_size = 4\nmicro_batch_size = 3", "micro_batch_size"},
           {"steps = 1\nlearning_rate = inf", "learning_rate"},
           {"steps = 1\nwarmup_steps = -1", "warmup_steps"},
           {"steps = 1\nbeta2 = 1.0", "beta2"},
           {"steps = 1\nepsilon = 0", "epsilon"},
           {"steps = 1\nclip = -1", "clip"},
           {"steps = 1\nschedule = 'cosin'", "cosine"},
           {"steps = 1\nprecision = 'fp8'", "precision"},
           {"steps = 1\ndecay_fraction = 1.5", "decay_fraction"},
           {"steps = 9000000000000000000", "steps"}})
    for (const std::string& part : {std::string("m.toml"), key}) EXPECT_MESSAGE(config(text), part);
}

}  // namespace
}  // namespace assay::train
