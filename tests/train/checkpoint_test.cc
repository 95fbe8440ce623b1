// Files that saving and pruning of checkpoints leave in the folder of a run. Ranks that write
// together write the bytes of one process.
#include "train/checkpoint.h"

#include <torch/torch.h>

#include "data/folder.h"
#include "nn/rank_threads.h"
#include "nn/testing.h"

namespace assay::train {
namespace {

constexpr const char* kModel =
    "[model]\nvocab_size = 11\nd_model = 8\n[model.attention]\nnum_heads = 2\n";

struct Checkpoints : testing::Test {
  Checkpoints() : model(nn::random_model(kModel)), optimizer(*model, TrainConfig{}) {}
  void save(int64_t step) { save_checkpoint(run, *model, optimizer, {.step = step}); }
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& entry : fs::directory_iterator(folder / "checkpoints"))
      found.push_back(entry.path().filename());
    std::ranges::sort(found);
    return found;
  }
  const data::Folder folder;
  const run::Folder run{folder.path()};
  std::shared_ptr<nn::LanguageModel> model;
  AdamW optimizer;
};

// The state of training of one rank. The moments are random numbers that depend on their names.
struct TrainedRank {
  explicit TrainedRank(Ranks* ranks)
      : model(nn::random_model(kModel)),
        sum(model->parameters(), 4, ranks, /*overlap=*/false),
        optimizer(*model, TrainConfig{}, &sum) {
    optimizer.write_moments([](const std::string& name, const at::Tensor& moment) {
      moment.copy_(at::randn(moment.sizes(), nn::generator(name), moment.options()));
    });
  }
  std::shared_ptr<nn::LanguageModel> model;
  GradientSum sum;
  AdamW optimizer;
};

std::map<std::string, std::string> files_of(const run::Checkpoint& checkpoint) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(checkpoint.path))
    files[entry.path().filename()] = read_file(entry.path());
  return files;
}

// Saves a checkpoint with this number of ranks. Odd ranks use the folder `odd`.
void save_with_ranks(int64_t size, const run::Folder& run, const run::Folder& odd) {
  nn::RankThreads(size).run([&](Ranks& ranks) {
    TrainedRank trained(&ranks);
    save_checkpoint(ranks.rank() % 2 == 1 ? odd : run, *trained.model, trained.optimizer,
                    {.step = 7}, &ranks);
  });
}

struct CheckpointsOfRanks : testing::Test {
  CheckpointsOfRanks() {
    const TrainedRank trained(nullptr);
    const run::Folder alone{folder / "alone"};
    save_checkpoint(alone, *trained.model, trained.optimizer, {.step = 7});
    expected = files_of(alone.checkpoint(7));
  }
  void expect_same(const run::Folder& run) const {
    const auto files = files_of(run.checkpoint(7));
    EXPECT_EQ(files.size(), 3u);
    for (const auto& [name, bytes] : expected)
      EXPECT_TRUE(files.contains(name) && files.at(name) == bytes) << name;
    EXPECT_FALSE(fs::exists(run.unfinished_checkpoints()));
  }
  const data::Folder folder;
  std::map<std::string, std::string> expected;
};

TEST_F(CheckpointsOfRanks, HaveTheBytesOfOneProcess) {
  for (const int64_t size : {1, 2, 4}) {
    SCOPED_TRACE(fmt::format("{} ranks", size));
    const run::Folder run{folder / fmt::format("ranks{}", size)};
    save_with_ranks(size, run, run);
    expect_same(run);
  }
}

TEST_F(CheckpointsOfRanks, RankZeroWritesForRanksThatDoNotSeeTheFolder) {
  for (const int64_t size : {2, 4}) {
    SCOPED_TRACE(fmt::format("{} ranks", size));
    const run::Folder run{folder / fmt::format("ranks{}", size)};
    const run::Folder odd{folder / "elsewhere"};
    save_with_ranks(size, run, odd);
    expect_same(run);
    EXPECT_FALSE(fs::exists(odd.path));
  }
}

TEST_F(CheckpointsOfRanks, AnotherNumberOfRanksReadsThem) {
  const run::Folder run{folder / "ranks4"};
  save_with_ranks(4, run, run);
  const run::Folder again{folder / "ranks2"};
  nn::RankThreads(2).run([&](Ranks& ranks) {
    TrainedRank trained(&ranks);
    const auto clear = [](const std::string&, const at::Tensor& moment) { moment.zero_(); };
    trained.optimizer.write_moments(clear);
    load_checkpoint(run.checkpoint(7), *trained.model, trained.optimizer);
    save_checkpoint(again, *trained.model, trained.optimizer, {.step = 7}, &ranks);
  });
  expect_same(again);
}

// Rank 0 alone decides: the others need not see the checkpoint.
TEST_F(CheckpointsOfRanks, CheckpointThatExistsIsNotWrittenAgain) {
  const run::Folder run{folder / "run"};
  folder.write("run/checkpoints/step-7/state.json", "old");
  save_with_ranks(2, run, {folder / "elsewhere"});
  EXPECT_EQ(files_of(run.checkpoint(7)),
            (std::map<std::string, std::string>{{"state.json", "old"}}));
}

TEST_F(Checkpoints, FailedSaveLeavesNothing) {
  model->to(at::kComplexDouble);  // safetensors has no such dtype
  EXPECT_THROW(save(3), Error);
  EXPECT_TRUE(names().empty());
}

// The moments, which come after the weights, can be written.
TEST_F(Checkpoints, WeightsThatCannotBeWrittenLeaveNothing) {
  model->parameters().front().storage().set_data_ptr_noswap({nullptr, at::kCPU});
  EXPECT_THROW(save(3), Error);
  EXPECT_TRUE(names().empty());
}

// Changes the lowest bit of the byte in the middle, which belongs to a tensor.
void damage(const fs::path& file) {
  std::string bytes = read_file(file);
  bytes[bytes.size() / 2] ^= 1;
  write_file(file, bytes);
}

TEST_F(Checkpoints, ChangedBitIsNoticed) {
  save(3);
  const run::Checkpoint checkpoint = run.checkpoint(3);
  EXPECT_EQ(load_checkpoint(checkpoint, *model, optimizer).step, 3);
  for (const fs::path& file : {checkpoint.weights(), checkpoint.moments()}) {
    damage(file);
    const std::string message =
        data::message_of([&] { load_checkpoint(checkpoint, *model, optimizer); });
    EXPECT_NE(message.find(file.string() + ": the file is damaged"), std::string::npos) << message;
    damage(file);  // restores it
  }
  EXPECT_EQ(load_checkpoint(checkpoint, *model, optimizer).step, 3);
}

// An older version wrote none.
TEST_F(Checkpoints, CheckpointWithoutChecksumsIsRead) {
  save(3);
  const run::Checkpoint checkpoint = run.checkpoint(3);
  checkpoint.state().write({.step = 3});
  EXPECT_EQ(load_checkpoint(checkpoint, *model, optimizer).step, 3);
}

TEST_F(Checkpoints, PruningKeepsTheNewestTwoAndThoseOfKeepSteps) {
  for (const int64_t step : {1, 2, 3, 4}) save(step);
  prune_checkpoints(run, {1});
  EXPECT_EQ(names(), (std::vector<std::string>{"step-1", "step-3", "step-4"}));
}

TEST_F(Checkpoints, RemainsOfAKilledProcessAreRemoved) {
  save(1);
  folder.write("checkpoints/writing/model.safetensors", "half");
  folder.write("checkpoints/removing/model.safetensors", "half");
  remove_scratch(run);
  EXPECT_EQ(names(), std::vector<std::string>{"step-1"});
}

}  // namespace
}  // namespace assay::train
