// Activation checkpointing: the second run of a layer takes what the first one remembered, and
// gradients stay what they are.
#include "nn/recompute.h"

#include <torch/torch.h>

#include "testing.h"

namespace assay::nn {
namespace {

TEST(Recompute, TheSecondRunRecallsWhatTheFirstRemembered) {
  int runs = 0;
  std::vector<bool> again;
  const auto layer = [&](const at::Tensor& x, Handed&) {
    const auto first = recalled();
    const auto second = recalled();
    again.push_back(first.has_value());
    EXPECT_EQ(first.has_value(), second.has_value());
    if (first) EXPECT_TRUE(first->item<int>() == 1 && second->item<int>() == 2);
    remember(at::full({}, ++runs));
    remember(at::full({}, ++runs));
    return x * 3;
  };
  const at::Tensor x = torch::ones({2}, torch::requires_grad());
  Handed handed;
  recomputed(layer, x, handed).sum().backward();
  EXPECT_EQ(again, (std::vector<bool>{false, true}));
  EXPECT_TRUE(at::equal(x.grad(), at::full({2}, 3.f)));
}

TEST(Recompute, OutsideOfItNothingIsRecalled) {
  remember(at::ones({}));
  EXPECT_FALSE(recalled());
}

TEST(Recompute, AnErrorLeavesNothingBehind) {
  Handed handed;
  const auto broken = [](const at::Tensor&, Handed&) -> at::Tensor {
    remember(at::ones({}));
    throw std::runtime_error("broken");
  };
  EXPECT_THROW(recomputed(broken, torch::ones({2}, torch::requires_grad()), handed),
               std::runtime_error);
  EXPECT_FALSE(recalled());
}

TEST(Recompute, Top1ChoosesOnce) {
  const auto mixer =
      mixers().at("top1_chunk").make(ConfigNode::parse("num_heads = 2\nchunk_size = 4\n"), 16);
  int runs = 0;
  const auto layer = [&](const at::Tensor& x, Handed&) {
    State none;
    const at::Tensor y = mixer->forward(x, none);
    if (++runs == 2)
      EXPECT_THROW(recalled(), std::out_of_range) << "the mixer has taken what it remembered";
    return y;
  };
  const at::Tensor x = at::randn({2, 33, 16}, generator("x")).requires_grad_();
  Handed handed;
  recomputed(layer, x, handed).sum().backward();
  EXPECT_EQ(runs, 2);
}

void expect_equal_gradients(const std::string& layers) {
  const auto model =
      random_model("[model]\nvocab_size = 17\nd_model = 16\nnum_layers = 2\n" + layers);
  const at::Tensor tokens = random_tokens(2, 33, 17, "tokens");
  const auto gradients = [&] {
    model->zero_grad();
    model->loss(tokens).backward();
    std::vector<at::Tensor> out;
    for (const at::Tensor& parameter : model->parameters()) out.push_back(parameter.grad().clone());
    return out;
  };
  const auto kept = gradients();
  model->recompute_activations = true;
  const auto found = gradients();
  for (size_t i = 0; i < kept.size(); ++i) EXPECT_LE(relative_error(found[i], kept[i]), 1e-13) << i;
}
TEST(Recompute, GradientsStayWhatTheyAre) {
  expect_equal_gradients(
      "pattern = ['top1_chunk']\n"
      "[model.top1_chunk]\nnum_heads = 2\nchunk_size = 4\nselection = 'exact'\n");
}
// Attention rotates its queries and keys where the projection wrote them.
TEST(Recompute, GradientsOfRotationsInPlaceStayWhatTheyAre) {
  expect_equal_gradients("pattern = ['attention']\n[model.attention]\nnum_heads = 2\n");
}

}  // namespace
}  // namespace assay::nn
