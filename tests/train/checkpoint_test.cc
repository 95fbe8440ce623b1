// What saving and pruning of checkpoints leave in the folder of a run.
#include "train/checkpoint.h"

#include <torch/torch.h>

#include "data/folder.h"
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

TEST_F(Checkpoints, FailedSaveLeavesNothing) {
  model->to(at::kComplexDouble);  // safetensors has no such dtype
  EXPECT_THROW(save(3), Error);
  EXPECT_TRUE(names().empty());
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
