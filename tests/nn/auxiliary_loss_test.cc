// Auxiliary losses: training minimises their sum and the loss of the model, and nothing else reads
// them.
#include <torch/torch.h>

#include "auxiliary_mixer.h"
#include "nn/context.h"
#include "testing.h"

namespace assay::nn {
namespace {

const char* const kModel = R"(
  [model]
  vocab_size = 17
  d_model = 16
  num_layers = 3
  pattern = ["auxiliary_mixer", "attention"]
  [model.attention]
  num_heads = 2
)";
const char* const kPlain = R"(
  [model]
  vocab_size = 17
  d_model = 16
  num_layers = 3
  pattern = ["attention"]
  [model.attention]
  num_heads = 2
)";

std::shared_ptr<LanguageModel> model_of(const char* toml) {
  const auto model = random_model(toml);
  model->compute_dtype = at::kDouble;
  return model;
}
std::vector<at::Tensor> gradients(LanguageModel& model, const at::Tensor& loss) {
  return torch::autograd::grad({loss}, model.parameters());
}

TEST(AuxiliaryLoss, IsTheSumOverTheLayers) {
  const auto model = model_of(kModel);
  const at::Tensor tokens = random_tokens(2, 9, 17, "tokens");
  at::Tensor expected = at::zeros({}, at::kDouble);
  ModelState none;
  at::Tensor x = model->embed(tokens.slice(1, 0, -1), none);
  for (const auto& layer : model->layers) {
    State alone;
    if (layer->mixer->has_auxiliary_loss())
      expected = expected +
                 0.5 * layer->mixer->forward(layer->mixer_norm->forward(x), alone).square().mean();
    State state;
    x = layer->forward(x, state, at::kDouble);
  }
  const at::Tensor losses = model->training_losses(tokens);
  ASSERT_EQ(losses.numel(), 2);
  EXPECT_LE(relative_error(losses[0], model->loss(tokens)), 1e-15);
  EXPECT_LE(relative_error(losses[1], expected), 1e-14);
  EXPECT_GT(losses[1].item<double>(), 0.01);
}

TEST(AuxiliaryLoss, NoPartWithOneLeavesTheLossAlone) {
  const auto model = model_of(kPlain);
  const at::Tensor tokens = random_tokens(2, 9, 17, "tokens");
  const at::Tensor losses = model->training_losses(tokens);
  const at::Tensor loss = model->loss(tokens);
  ASSERT_EQ(losses.numel(), 1);
  EXPECT_TRUE(at::equal(losses[0], loss));
  const auto expected = gradients(*model, loss);
  const auto found = gradients(*model, losses.sum());
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(found[i], expected[i])) << i;
}

TEST(AuxiliaryLoss, EvaluationDoesNotAskForIt) {
  const auto model = model_of(kModel);
  const at::Tensor tokens = random_tokens(2, 9, 17, "tokens");
  EXPECT_LE(relative_error(model->token_losses(tokens).mean(), model->loss(tokens)), 1e-14);
  ModelState state;
  model->hidden(tokens, state);
  EXPECT_FALSE(state.auxiliary_loss.defined());
}

TEST(AuxiliaryLoss, RecomputedLayersCountItOnce) {
  const auto model = model_of(kModel);
  const at::Tensor tokens = random_tokens(2, 9, 17, "tokens");
  const at::Tensor kept = model->training_losses(tokens);
  const auto expected = gradients(*model, kept.sum());
  model->recompute_activations = true;
  model->zero_grad();
  const at::Tensor again = model->training_losses(tokens);
  EXPECT_TRUE(at::equal(again, kept));
  again.sum().backward();
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_LE(relative_error(model->parameters()[i].grad(), expected[i]), 1e-13) << i;
}

TEST(AuxiliaryLoss, SlicesOfASequenceAddUpToThatOfWholeOnes) {
  const auto model = model_of(kModel);
  const at::Tensor tokens = random_tokens(2, 13, 17, "tokens");
  const at::Tensor whole = model->training_losses(tokens);
  const auto expected = gradients(*model, whole.sum());
  for (const bool recompute : {false, true})
    for (const int64_t count : {1, 2, 3}) {
      SCOPED_TRACE(fmt::format("{} slices, recompute = {}", count, recompute));
      model->recompute_activations = recompute;
      model->zero_grad();
      const auto losses =
          sliced_loss(*model, tokens, {count, 0, count}, nullptr, double(count), [](size_t) {});
      EXPECT_LE(relative_error(at::stack(losses).sum(0), whole), 1e-13);
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_LE(relative_error(model->parameters()[i].grad(), expected[i]), 1e-12) << i;
    }
}

}  // namespace
}  // namespace assay::nn
