// Losses by position against the losses of whole sequences, and bins counted by hand.
#include "eval/extrapolation.h"

#include <torch/torch.h>

#include "nn/testing.h"

namespace assay::eval {
namespace {

TEST(Extrapolation, LossesDoNotDependOnPieces) {
  const auto model = nn::random_model(
      "[model]\nvocab_size = 16\nd_model = 16\nnum_layers = 2\npattern = ['attention', 'mamba1']\n"
      "[model.attention]\nnum_heads = 2\n");
  const at::Tensor tokens = nn::random_tokens(3, 50, 16, "tokens");
  const at::Tensor expected = model->token_losses(tokens);
  for (const int64_t piece : {1, 7, 64})
    EXPECT_LE(nn::relative_error(losses_by_position(*model, tokens, piece), expected), 1e-6)
        << piece;
}

TEST(Extrapolation, BinsCoverEveryPositionOnce) {
  const at::Tensor losses = at::arange(70, at::kFloat).repeat({2, 1});
  const auto bins = bin_positions(losses, 16);
  int64_t next = 0;
  for (const PositionBin& bin : bins) {
    EXPECT_EQ(bin.first, next);
    next = bin.last;
    ASSERT_EQ(bin.losses.size(), 2u);
    EXPECT_DOUBLE_EQ(bin.losses[1], double(bin.first + bin.last - 1) / 2);
  }
  EXPECT_EQ(next, 70);
  EXPECT_EQ(bins[4].first, 16) << "one bin begins at the length of the training";
}

}  // namespace
}  // namespace assay::eval
