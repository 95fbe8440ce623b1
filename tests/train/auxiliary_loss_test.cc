// Auxiliary losses in the trainer: the weights do not depend on how a batch is cut, and
// metrics.jsonl shows the losses apart.
#include <torch/torch.h>

#include "data/folder.h"
#include "data/sampler.h"
#include "data/synthetic.h"
#include "data/token_store.h"
#include "nn/auxiliary_mixer.h"
#include "nn/rank_threads.h"
#include "nn/tensors.h"
#include "nn/testing.h"
#include "run/metrics.h"
#include "train/step_gradient.h"
#include "train/trainer.h"

namespace assay::train {
namespace {

using data::Folder;

struct AuxiliaryLossInTraining : testing::Test {
  void SetUp() override {
    data::SyntheticOptions options;
    options.documents = 20;
    options.held_out = 4;
    options.document_length = 64;
    options.vocabulary = 64;
    data::synthesize(folder / "store", options);
  }
  RunConfig config(const std::string& train, double weight = 0.5,
                   const std::string& pattern = "'auxiliary_mixer', 'attention'") const {
    std::string text = "[model]\nd_model = 16\nnum_layers = 3\npattern = [" + pattern +
                       "]\n[model.attention]\nnum_heads = 2\n";
    if (pattern.find("auxiliary") != std::string::npos)
      text += fmt::format("[model.auxiliary_mixer]\nweight = {}\n", weight);
    text +=
        "[train]\nsteps = 4\nbatch_size = 6\nsequence_length = 24\neval_tokens = 100\n"
        "log_every = 3\nprecision = 'fp64'\nepsilon = 1e-3\n" +
        train;
    return read_run_config(ConfigNode::parse(text), folder / "store");
  }
  TrainOptions options(const std::string& run) const {
    return {.store = folder / "store", .run = folder / run, .device = "cpu"};
  }
  nn::NamedTensors weights(const std::string& run, int64_t step = 4) const {
    return nn::load_tensors(folder / run / "checkpoints" / fmt::format("step-{}", step) /
                            "model.safetensors");
  }
  std::vector<run::TrainingLine> lines(const std::string& run) const {
    return run::read_metrics(run::Folder{folder / run}).training;
  }
  Folder folder;
};

TEST_F(AuxiliaryLossInTraining, WeightsAndLossesDoNotDependOnTheCuts) {
  train(config(""), options("whole"));
  const auto whole = weights("whole");
  const auto expected = lines("whole");
  int number = 0;
  for (const std::string more :
       {"micro_batch_size = 2\n", "gradient_slices = 3\n", "recompute_activations = true\n",
        "context_slices = 4\n", "context_slices = 2\ngradient_slices = 2\nmicro_batch_size = 1\n",
        "context_slices = 3\nrecompute_activations = true\n"}) {
    SCOPED_TRACE(more);
    const std::string run = fmt::format("cut {}", number++);
    train(config(more), options(run));
    const auto cut = weights(run);
    for (size_t i = 0; i < whole.size(); ++i)
      EXPECT_LE(nn::relative_error(cut[i].second, whole[i].second), 1e-10) << whole[i].first;
    const auto found = lines(run);
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i)
      EXPECT_NEAR(*found[i].auxiliary_loss, *expected[i].auxiliary_loss, 1e-12);
  }
}

TEST_F(AuxiliaryLossInTraining, RanksGiveTheBitsOfOneProcess) {
  const data::TokenStore store(folder / "store");
  const RunConfig c = config("gradient_slices = 2\ncontext_slices = 2\n");
  const data::Sampler sampler(store, {.sequence_length = c.train.sequence_length});
  // `gradients`: flat. Each rank fills the parts that it owns.
  const auto compute = [&](Ranks* ranks, const std::vector<at::Tensor>& gradients) {
    nn::LanguageModel model(c.model);
    model.initialise(1);
    model.to(at::kDouble);
    model.compute_dtype = at::kDouble;
    StepGradient gradient(model, sampler, c.train, at::kCPU, ranks);
    const at::Tensor losses = gradient.compute(0, false, false).losses;
    const auto parameters = model.parameters();
    const GradientSum& sum = *gradient.sum();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!ranks) gradients[i].copy_(parameters[i].grad().view(-1));
      for (const Part& part : sum.pieces().parts[i])
        if (ranks && sum.owns(part))
          gradients[i].narrow(0, part.begin, part.size).copy_(sum.gradient(part));
    }
    return losses;
  };
  const auto unknown = [&] {
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : nn::LanguageModel(c.model).parameters())
      gradients.push_back(at::full({parameter.numel()}, NAN, at::kDouble));
    return gradients;
  };
  const std::vector<at::Tensor> expected = unknown();
  const at::Tensor losses = compute(nullptr, expected);
  ASSERT_EQ(losses.numel(), 2);
  for (const int64_t number : {2, 4}) {
    const std::vector<at::Tensor> found = unknown();
    nn::RankThreads(number).run([&](Ranks& ranks) {
      const at::Tensor own = compute(&ranks, found);
      EXPECT_TRUE(at::equal(own, losses)) << "rank " << ranks.rank() << " of " << number;
    });
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(at::equal(found[i], expected[i])) << "parameter " << i << ", " << number;
  }
}

TEST_F(AuxiliaryLossInTraining, ItsWeightChangesWhatIsTrained) {
  train(config(""), options("half"));
  train(config("", 0), options("none"));
  EXPECT_GT(nn::relative_error(weights("half")[1].second, weights("none")[1].second), 1e-6);
}

TEST_F(AuxiliaryLossInTraining, MetricsShowItApartAndOnlyWhereThereIsOne) {
  train(config("", 1), options("one"));
  train(config("", 0), options("none"));
  train(config("", 0, "'attention'"), options("attention"));
  ASSERT_EQ(lines("one").size(), 2u);
  EXPECT_GT(*lines("one")[0].auxiliary_loss, 0);
  EXPECT_EQ(*lines("none")[0].auxiliary_loss, 0);
  EXPECT_FALSE(lines("attention")[0].auxiliary_loss);
  EXPECT_EQ(read_file(folder / "attention" / "metrics.jsonl").find("auxiliary"), std::string::npos);
  EXPECT_NEAR(lines("one")[0].loss, lines("none")[0].loss, 0.05) << "it is not a part of `loss`";
}

TEST_F(AuxiliaryLossInTraining, AResumedRunWritesTheSameLine) {
  train(config("checkpoint_every = 2\nkeep_steps = [2]\n"), options("run"));
  const auto expected = lines("run");
  fs::remove(folder / "run" / "done.json");
  for (const int64_t step : {3, 4})
    fs::remove_all(folder / "run" / "checkpoints" / fmt::format("step-{}", step));
  TrainOptions again = options("run");
  again.resume = true;
  train(config("checkpoint_every = 2\nkeep_steps = [2]\n"), again);
  ASSERT_EQ(lines("run").size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_EQ(lines("run")[i].auxiliary_loss, expected[i].auxiliary_loss) << i;
}

}  // namespace
}  // namespace assay::train
